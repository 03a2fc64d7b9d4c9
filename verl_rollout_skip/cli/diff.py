"""``rollout-skip diff``: what differs between two recordings: the settings first, then the steps row by row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option, tokenizer_option
from verl_rollout_skip.cli.folders import Place, Variant, find_place
from verl_rollout_skip.cli.text import NOTHING, counted, line, number, progress, table
from verl_rollout_skip.comparison import EntryDifference, FirstDifference, compare_entries, compare_settings
from verl_rollout_skip.config import describe_steps
from verl_rollout_skip.decoding import TextDecoder, find_decoder
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.key import RolloutKey

_BEFORE, _AFTER = 24, 16
_EXPLAINED = 5
_TITLES = {"rollout": "settings", "training": "training", "layout": "layout", "versions": "versions"}


@click.command(
    cls=Command,
    examples="rollout-skip diff /data/dumps/RUN/VARIANT /data/dumps/RUN/OTHER\n"
    "rollout-skip diff dumps/RUN/VARIANT/step_000001 dumps/RUN/VARIANT/step_000002\n"
    "rollout-skip diff /data/dumps/RUN/VARIANT /data/dumps/RUN/OTHER --steps 1",
)
@path_argument("a")
@path_argument("b", "the same of the other one")
@steps_option()
@tokenizer_option(default="the recorded ones")
def command(a: str, b: str, steps: str | None, tokenizer: str | None) -> Result:
    """Compare two recordings: runs, variants or single steps.

    First what their manifests say about how they were made, then the rollouts: which prompts and responses differ, the
    first differing token, and how scores and lengths shift. Rows are paired by the tokens of their prompts.

    The exit code is 0 if the settings, the training and the rollouts are the same, whatever the layout and the
    versions, and 1 if not.
    """
    place_a, place_b = find_place(a, steps), find_place(b, steps)
    pairs, only_a, only_b = _pair_variants(place_a, place_b)
    compared = [_compare(place_a, place_b, *pair, tokenizer) for pair in pairs]
    same = not (only_a or only_b) and all(pair["same"] for pair in compared)
    data = {
        "a": place_a.path,
        "b": place_b.path,
        "same": same,
        "only_in_a": [variant.path for variant in only_a],
        "only_in_b": [variant.path for variant in only_b],
        "pairs": compared,
    }
    return Result(data, render, 0 if same else 1)


def render(console: Console, data: dict[str, Any]) -> None:
    for pair in data["pairs"]:
        line(console, f"a: {pair['a']}", "bold")
        line(console, f"b: {pair['b']}", "bold")
        _render_settings(console, pair)
        _render_steps(console, pair)
    for side in ("a", "b"):
        for path in data[f"only_in_{side}"]:
            line(console, f"only in {side}: {path}", "yellow")
    if data["same"]:
        line(console, "the same", "green")


def _pair_variants(a: Place, b: Place) -> tuple[list[tuple[Variant, Variant]], list[Variant], list[Variant]]:
    """The two variants if each side has one; otherwise those with the same name, and what is left on each side."""
    if len(a.variants) == len(b.variants) == 1:
        return [(a.variants[0], b.variants[0])], [], []
    # Two runs pair by the names of their variants; with several runs on one side, run and name count on both.
    parts = 2 if any(len({variant.run_path for variant in place.variants}) > 1 for place in (a, b)) else 1
    by_name = [{tuple(variant.path.split("/")[-parts:]): variant for variant in place.variants} for place in (a, b)]
    both = [name for name in by_name[0] if name in by_name[1]]
    if not both:
        listed = ", ".join(variant.path for place in (a, b) for variant in place.variants)
        raise StoreError(f"No variant of {a.path} is in {b.path}. Choose one on each side: {listed}")
    only = [[variant for name, variant in side.items() if name not in both] for side in by_name]
    return [(by_name[0][name], by_name[1][name]) for name in both], only[0], only[1]


def _compare(a: Place, b: Place, one: Variant, two: Variant, tokenizer: str | None) -> dict[str, Any]:
    settings = None
    if one.manifest is not None and two.manifest is not None:
        settings = compare_settings(one.manifest, two.manifest)
    pairs, only_a, only_b = _pair_keys(a, b, one, two)
    decoders = _Decoders(one, two, tokenizer)
    steps = []
    with progress() as bar:
        for key_a, key_b in bar.track(pairs, description=one.name):
            found = compare_entries(one.entries.entry(key_a), two.entries.entry(key_b))
            steps.append(_step(key_a, key_b, found, decoders))
    counts = settings is not None and settings.counts
    return {
        "a": one.path,
        "b": two.path,
        "same": not (counts or only_a or only_b) and all(step["same"] for step in steps),
        "settings": None if settings is None else asdict(settings),
        "without_manifest": [variant.path for variant in (one, two) if variant.manifest is None],
        "only_in_a": _plain_keys(only_a),
        "only_in_b": _plain_keys(only_b),
        "steps": steps,
    }


def _pair_keys(
    a: Place, b: Place, one: Variant, two: Variant
) -> tuple[list[tuple[RolloutKey, RolloutKey]], list[RolloutKey], list[RolloutKey]]:
    """Entries with the same key; of two single steps those with the same generation batch; two single entries."""
    keys_a, keys_b = a.chosen_keys(one), b.chosen_keys(two)
    if len(keys_a) == len(keys_b) == 1 and a.is_part and b.is_part:
        return [(keys_a[0], keys_b[0])], [], []
    single = all(len({key.step for key in keys}) == 1 for keys in (keys_a, keys_b)) and a.is_part and b.is_part
    found_a, found_b = ({(key.gen_batch if single else key): key for key in keys} for keys in (keys_a, keys_b))
    pairs = [(key, found_b[name]) for name, key in found_a.items() if name in found_b]
    only_a = [key for name, key in found_a.items() if name not in found_b]
    only_b = [key for name, key in found_b.items() if name not in found_a]
    if not pairs:
        held = [describe_steps({key.step for key in keys}) for keys in (keys_a, keys_b)]
        raise StoreError(f"They have no step in common: {one.path} holds {held[0]}, {two.path} holds {held[1]}.")
    return pairs, only_a, only_b


class _Decoders:
    """The tokenizers of both sides, opened when a difference is to be shown."""

    def __init__(self, one: Variant, two: Variant, given: str | None) -> None:
        self._variants, self._given = (one, two), given
        self._found: list[tuple[TextDecoder | None, str]] | None = None

    def context(self, first: FirstDifference) -> dict[str, Any]:
        """Both responses around the first differing token: ids, and text if there are tokenizers."""
        if self._found is None:
            self._found = [find_decoder(v.path, v.manifest, self._given) for v in self._variants]
        start = max(first.token - _BEFORE, 0)
        shown: dict[str, Any] = {"row_a": first.row_a, "row_b": first.row_b, "token": first.token}
        for side, response, found in zip("ab", (first.response_a, first.response_b), self._found, strict=True):
            decoder, why = found
            before, after = response[start : first.token], response[first.token : first.token + _AFTER]
            ends = first.token + _AFTER >= len(response)
            shown[f"tokens_{side}"] = {"before": list(before), "after": list(after), "begins": start == 0, "ends": ends}
            text = None
            if decoder is not None:
                text = {"before": decoder.text(before), "after": decoder.text(after)}
            shown[f"text_{side}"], shown[f"no_tokenizer_{side}"] = text, why or None
        return shown


def _step(key_a: RolloutKey, key_b: RolloutKey, found: EntryDifference, decoders: _Decoders) -> dict[str, Any]:
    fields = asdict(found)
    responses = found.responses
    if responses is not None:
        fields["responses"]["first"] = None if responses.first is None else decoders.context(responses.first)
    same = fields.pop("identical")
    return {"step": key_a.step, "gen_batch": key_a.gen_batch, "b": asdict(key_b), "same": same, **fields}


def _plain_keys(keys: list[RolloutKey]) -> list[dict[str, int]]:
    return [asdict(key) for key in keys]


def _render_settings(console: Console, pair: dict[str, Any]) -> None:
    for path in pair["without_manifest"]:
        line(console, f"settings: not known, {path} has no manifest that can be read", "yellow")
    for key, title in _TITLES.items() if pair["settings"] is not None else ():
        changed = pair["settings"][key]
        line(console, f"{title}: " + (f"different ({len(changed)})" if changed else "the same"))
        for text in changed:
            line(console, f"  {text}")


def _render_steps(console: Console, pair: dict[str, Any]) -> None:
    console.print()
    headers = ("step", "rows", "prompts", "responses", "first token", "score", "length")
    table(console, headers, [_row(step) for step in pair["steps"]])
    for side in ("a", "b"):
        keys = pair[f"only_in_{side}"]
        if keys:
            steps = describe_steps({key["step"] for key in keys})
            line(console, f"only in {side}: {counted(len(keys), 'entry', 'entries')} of steps {steps}", "yellow")
    differing = [step for step in pair["steps"] if not step["same"]]
    for step in differing[:_EXPLAINED]:
        _render_details(console, step)
    for why in _no_tokenizer(differing[:_EXPLAINED]):
        line(console, f"Token ids instead of text: {why} Choose one with --tokenizer DIR.")
    if len(differing) > _EXPLAINED:
        line(console, f"{len(differing) - _EXPLAINED} more steps differ: --steps explains those that you name")
    console.print()


def _row(step: dict[str, Any]) -> list[str]:
    label = str(step["step"]) if not step["gen_batch"] else f"{step['step']}/{step['gen_batch']}"
    other = step["b"]
    if (other["step"], other["gen_batch"]) != (step["step"], step["gen_batch"]):
        label += f" → {other['step']}" + (f"/{other['gen_batch']}" if other["gen_batch"] else "")
    rows = f"{step['rows_a']}" if step["rows_a"] == step["rows_b"] else f"{step['rows_a']} → {step['rows_b']}"
    if step["same"]:
        return [label, rows, "same", "same", NOTHING, "same", "same"]
    prompts, responses = step["prompts"], step["responses"]
    first = NOTHING if responses is None or responses["earliest"] is None else str(responses["earliest"])
    return [
        label,
        rows,
        _prompts(prompts),
        NOTHING if responses is None else f"{responses['differ']} differ" if responses["differ"] else "same",
        first,
        _shift(step["score"], 3),
        _shift(step["length"], 1),
    ]


def _prompts(prompts: dict[str, Any] | None) -> str:
    if prompts is None:
        return NOTHING
    other = max(prompts["only_a"], prompts["only_b"])
    return f"{other} differ" if other else "reordered" if prompts["reordered"] else "same"


def _shift(shift: dict[str, Any] | None, digits: int) -> str:
    if shift is None:
        return NOTHING
    if not shift["changed"]:
        return "same"
    return f"{number(shift['mean_a'], digits)} → {number(shift['mean_b'], digits)}"


def _render_details(console: Console, step: dict[str, Any]) -> None:
    name = f"step {step['step']}" + (f", generation batch {step['gen_batch']}" if step["gen_batch"] else "")
    prompts, responses = step["prompts"], step["responses"]
    if prompts is not None and prompts["other_inputs"]:
        line(
            console, f"{name}: {counted(prompts['other_inputs'], 'row')} with the same prompt and other inputs besides"
        )
    if step["columns"]:
        line(console, f"{name}: columns that differ: {', '.join(step['columns'])}")
    first = None if responses is None else responses["first"]
    if first is None:
        return
    line(
        console,
        f"{name}: the first pair that differs is row {first['row_a']} and row {first['row_b']}, from token "
        f"{first['token']} on:",
    )
    for side in ("a", "b"):
        line(console, f"  {side}: {_context(first[f'tokens_{side}'], first[f'text_{side}'])}")


def _no_tokenizer(steps: list[dict[str, Any]]) -> list[str]:
    """Why responses are shown as token ids, each reason once."""
    shown = [step["responses"]["first"] for step in steps if step["responses"] is not None]
    whys = [first[f"no_tokenizer_{side}"] for first in shown if first is not None for side in "ab"]
    return list(dict.fromkeys(why for why in whys if why is not None))


def _context(tokens: dict[str, Any], text: dict[str, Any] | None) -> str:
    if text is not None:
        before, after = repr(text["before"])[1:-1], repr(text["after"])[1:-1]
    else:
        before, after = (" ".join(map(str, tokens[part])) for part in ("before", "after"))
    end = " (ends)" if tokens["ends"] else "…"
    return f"{'' if tokens['begins'] else '…'}{before} ⟨{after}⟩{end}"
