"""``rollout-skip diff``: compares two recordings, first their settings, then their steps row by row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from verl_rollout_skip.cli.command import Command, Result, path_argument, steps_option, tokenizer_option
from verl_rollout_skip.cli.output import (
    MISSING,
    format_number,
    pluralize,
    print_line,
    print_no_text,
    print_table,
    progress,
)
from verl_rollout_skip.cli.selection import Selection, Variant, select
from verl_rollout_skip.config.skip_config import describe_steps
from verl_rollout_skip.errors import StoreError
from verl_rollout_skip.key import RolloutKey
from verl_rollout_skip.tools.decoding import TextDecoder, find_decoder
from verl_rollout_skip.tools.diff import EntryDifference, FirstDifference, compare_entries, compare_settings

_TOKENS_BEFORE, _TOKENS_AFTER = 24, 16
_MAX_DETAILS = 5
_TITLES = {"rollout": "settings", "training": "training", "layout": "layout", "versions": "versions"}


@click.command(
    cls=Command,
    examples="rollout-skip diff /data/dumps/RUN/VARIANT /data/dumps/RUN/OTHER\n"
    "rollout-skip diff dumps/RUN/VARIANT/step_000001 dumps/RUN/VARIANT/step_000002\n"
    "rollout-skip diff /data/dumps/RUN/VARIANT /data/dumps/RUN/OTHER --steps 1",
)
@path_argument("a")
@path_argument("b", "the recording to compare it with")
@steps_option()
@tokenizer_option(default="the recorded ones")
def command(a: str, b: str, steps: str | None, tokenizer: str | None) -> Result:
    """Compare two recordings: runs, variants or single steps.

    First compares the settings in their manifests, then the rollouts: which prompts and responses differ, the first
    differing token, and how scores and lengths change. Rows are paired by the tokens of their prompts.

    The exit code is 0 if the settings, the training and the rollouts are the same, and 1 otherwise. Layout and
    versions are ignored.
    """
    selection_a, selection_b = select(a, steps), select(b, steps)
    pairs, only_a, only_b = _pair_variants(selection_a, selection_b)
    compared = [_compare(selection_a, selection_b, *pair, tokenizer) for pair in pairs]
    same = not (only_a or only_b) and all(pair["same"] for pair in compared)
    data = {
        "a": selection_a.path,
        "b": selection_b.path,
        "same": same,
        "only_in_a": [variant.path for variant in only_a],
        "only_in_b": [variant.path for variant in only_b],
        "pairs": compared,
    }
    return Result(data, render, 0 if same else 1)


def render(console: Console, data: dict[str, Any]) -> None:
    for pair in data["pairs"]:
        print_line(console, f"a: {pair['a']}", "bold")
        print_line(console, f"b: {pair['b']}", "bold")
        _render_settings(console, pair)
        _render_steps(console, pair)
    for side in ("a", "b"):
        for path in data[f"only_in_{side}"]:
            print_line(console, f"only in {side}: {path}", "yellow")
    if data["same"]:
        print_line(console, "the same", "green")


def _pair_variants(a: Selection, b: Selection) -> tuple[list[tuple[Variant, Variant]], list[Variant], list[Variant]]:
    """Pair the variants by name, or the only two. Also returns the unpaired variants of each side."""
    if len(a.variants) == len(b.variants) == 1:
        return [(a.variants[0], b.variants[0])], [], []
    # Variants of two runs are paired by name. If either side has several runs, the names of the runs must match too.
    parts = 2 if any(len({variant.run_path for variant in selection.variants}) > 1 for selection in (a, b)) else 1
    by_name = [
        {tuple(variant.path.split("/")[-parts:]): variant for variant in selection.variants} for selection in (a, b)
    ]
    both = [name for name in by_name[0] if name in by_name[1]]
    if not both:
        listed = ", ".join(variant.path for selection in (a, b) for variant in selection.variants)
        raise StoreError(f"{a.path} and {b.path} have no variant in common. Choose one on each side: {listed}")
    only = [[variant for name, variant in side.items() if name not in both] for side in by_name]
    return [(by_name[0][name], by_name[1][name]) for name in both], only[0], only[1]


def _compare(
    a: Selection, b: Selection, variant_a: Variant, variant_b: Variant, tokenizer: str | None
) -> dict[str, Any]:
    settings = None
    if variant_a.manifest is not None and variant_b.manifest is not None:
        settings = compare_settings(variant_a.manifest, variant_b.manifest)
    pairs, only_a, only_b = _pair_keys(a, b, variant_a, variant_b)
    decoders = _Decoders(variant_a, variant_b, tokenizer)
    steps = []
    with progress() as bar:
        for key_a, key_b in bar.track(pairs, description=variant_a.name):
            found = compare_entries(variant_a.entries.entry(key_a), variant_b.entries.entry(key_b))
            steps.append(_step(key_a, key_b, found, decoders))
    counts = settings is not None and settings.counts
    return {
        "a": variant_a.path,
        "b": variant_b.path,
        "same": not (counts or only_a or only_b) and all(step["same"] for step in steps),
        "settings": None if settings is None else asdict(settings),
        "without_manifest": [variant.path for variant in (variant_a, variant_b) if variant.manifest is None],
        "only_in_a": _keys_to_json(only_a),
        "only_in_b": _keys_to_json(only_b),
        "steps": steps,
    }


def _pair_keys(
    a: Selection, b: Selection, variant_a: Variant, variant_b: Variant
) -> tuple[list[tuple[RolloutKey, RolloutKey]], list[RolloutKey], list[RolloutKey]]:
    """Pair entries by key. Two single steps are paired by generation batch, and two single entries with each other."""
    keys_a, keys_b = a.required_keys(variant_a), b.required_keys(variant_b)
    if len(keys_a) == len(keys_b) == 1 and a.is_partial and b.is_partial:
        return [(keys_a[0], keys_b[0])], [], []
    single = all(len({key.step for key in keys}) == 1 for keys in (keys_a, keys_b)) and a.is_partial and b.is_partial
    found_a, found_b = ({(key.gen_batch if single else key): key for key in keys} for keys in (keys_a, keys_b))
    pairs = [(key, found_b[name]) for name, key in found_a.items() if name in found_b]
    only_a = [key for name, key in found_a.items() if name not in found_b]
    only_b = [key for name, key in found_b.items() if name not in found_a]
    if not pairs:
        present = [describe_steps({key.step for key in keys}) for keys in (keys_a, keys_b)]
        raise StoreError(
            f"No step is in both recordings: {variant_a.path} contains {present[0]} and "
            f"{variant_b.path} contains {present[1]}."
        )
    return pairs, only_a, only_b


class _Decoders:
    """The tokenizers of both sides, opened when the first difference is shown."""

    def __init__(self, variant_a: Variant, variant_b: Variant, given: str | None) -> None:
        self._variants, self._given = (variant_a, variant_b), given
        self._found: list[tuple[TextDecoder | None, str]] | None = None

    def context(self, first: FirstDifference) -> dict[str, Any]:
        """Both responses around the first differing token: token ids, and text if there is a tokenizer."""
        if self._found is None:
            self._found = [find_decoder(v.path, v.manifest, self._given) for v in self._variants]
        start = max(first.token - _TOKENS_BEFORE, 0)
        shown: dict[str, Any] = {"row_a": first.row_a, "row_b": first.row_b, "token": first.token}
        for side, response, found in zip("ab", (first.response_a, first.response_b), self._found, strict=True):
            decoder, why = found
            before, after = response[start : first.token], response[first.token : first.token + _TOKENS_AFTER]
            ends = first.token + _TOKENS_AFTER >= len(response)
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


def _keys_to_json(keys: list[RolloutKey]) -> list[dict[str, int]]:
    return [asdict(key) for key in keys]


def _render_settings(console: Console, pair: dict[str, Any]) -> None:
    for path in pair["without_manifest"]:
        print_line(console, f"settings: unknown, because {path} has no readable manifest", "yellow")
    for key, title in _TITLES.items() if pair["settings"] is not None else ():
        changed = pair["settings"][key]
        print_line(console, f"{title}: " + (f"different ({len(changed)})" if changed else "the same"))
        for text in changed:
            print_line(console, f"  {text}")


def _render_steps(console: Console, pair: dict[str, Any]) -> None:
    console.print()
    headers = ("step", "rows", "prompts", "responses", "first token", "score", "length")
    print_table(console, headers, [_row(step) for step in pair["steps"]])
    for side in ("a", "b"):
        keys = pair[f"only_in_{side}"]
        if keys:
            steps = describe_steps({key["step"] for key in keys})
            print_line(
                console, f"only in {side}: {pluralize(len(keys), 'entry', 'entries')} of steps {steps}", "yellow"
            )
    differing = [step for step in pair["steps"] if not step["same"]]
    for step in differing[:_MAX_DETAILS]:
        _render_details(console, step)
    for why in _no_tokenizer(differing[:_MAX_DETAILS]):
        print_no_text(console, why)
    if len(differing) > _MAX_DETAILS:
        print_line(console, f"{len(differing) - _MAX_DETAILS} more steps differ. Select them with --steps for details.")
    console.print()


def _row(step: dict[str, Any]) -> list[str]:
    label = str(step["step"]) if not step["gen_batch"] else f"{step['step']}/{step['gen_batch']}"
    other = step["b"]
    if (other["step"], other["gen_batch"]) != (step["step"], step["gen_batch"]):
        label += f" → {other['step']}" + (f"/{other['gen_batch']}" if other["gen_batch"] else "")
    rows = f"{step['rows_a']}" if step["rows_a"] == step["rows_b"] else f"{step['rows_a']} → {step['rows_b']}"
    if step["same"]:
        return [label, rows, "same", "same", MISSING, "same", "same"]
    prompts, responses = step["prompts"], step["responses"]
    first = MISSING if responses is None or responses["earliest"] is None else str(responses["earliest"])
    return [
        label,
        rows,
        _prompts(prompts),
        MISSING if responses is None else f"{responses['differ']} differ" if responses["differ"] else "same",
        first,
        _shift(step["score"], 3),
        _shift(step["length"], 1),
    ]


def _prompts(prompts: dict[str, Any] | None) -> str:
    if prompts is None:
        return MISSING
    other = max(prompts["only_a"], prompts["only_b"])
    return f"{other} differ" if other else "reordered" if prompts["reordered"] else "same"


def _shift(shift: dict[str, Any] | None, digits: int) -> str:
    if shift is None:
        return MISSING
    if not shift["changed"]:
        return "same"
    return f"{format_number(shift['mean_a'], digits)} → {format_number(shift['mean_b'], digits)}"


def _render_details(console: Console, step: dict[str, Any]) -> None:
    name = f"step {step['step']}" + (f", generation batch {step['gen_batch']}" if step["gen_batch"] else "")
    prompts, responses = step["prompts"], step["responses"]
    if prompts is not None and prompts["other_inputs"]:
        print_line(
            console,
            f"{name}: {pluralize(prompts['other_inputs'], 'row')} with the same prompt but different other inputs",
        )
    if step["columns"]:
        print_line(console, f"{name}: columns that differ: {', '.join(step['columns'])}")
    first = None if responses is None else responses["first"]
    if first is None:
        return
    print_line(
        console,
        f"{name}: the first rows that differ are {first['row_a']} (a) and {first['row_b']} (b), from token "
        f"{first['token']} on:",
    )
    for side in ("a", "b"):
        print_line(console, f"  {side}: {_context(first[f'tokens_{side}'], first[f'text_{side}'])}")


def _no_tokenizer(steps: list[dict[str, Any]]) -> list[str]:
    """The reasons why responses are shown as token ids, without duplicates."""
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
