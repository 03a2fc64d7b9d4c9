// The charts of the report: which statistics of the rollout steps they show.

const TRENDS = [
  { key: "score", title: "Score", lines: [["score", "mean"]], band: scoreBand, note: "band: ± standard deviation" },
  { key: "pass", title: "Pass rate", lines: [["pass_rate", "pass rate"]], formatValue: percent, range: [0, 1], note: passNote },
  {
    key: "length",
    title: "Response length in tokens",
    lines: [["length_p50", "median"], ["length_max", "longest", "thin"], ["limit", "limit", "dashed"]],
    band: (found) => [found.length_p10, found.length_p90],
    note: "band: 10th to 90th percentile",
    from0: true,
    formatValue: (value) => format(value, 0),
  },
  {
    key: "zero",
    title: "Groups without variance",
    lines: [["zero_variance", "all scores equal"]],
    formatValue: percent,
    range: [0, 1],
    note: "among groups with at least two responses",
  },
  { key: "time", title: "Generation time", lines: [["generate_s", "seconds"]], formatValue: seconds, from0: true },
  {
    key: "mismatch",
    title: "Mismatch of rollout and trainer",
    lines: [["mismatch_k3", "k3"], ["mismatch_mean_abs", "mean difference", "thin"]],
    from0: true,
    formatValue: (value) => value.toPrecision(2),
    note: "k3 estimates the KL divergence; the thin line is the mean absolute difference of the log-probs",
  },
  { key: "bytes", title: "Size on disk", lines: [["bytes", "bytes"]], formatValue: bytes, from0: true },
];

function scoreBand(found) {
  if (!isNumber(found.score) || !isNumber(found.score_std)) return [null, null];
  return [Math.max(found.score_min, found.score - found.score_std), Math.min(found.score_max, found.score + found.score_std)];
}

function passNote(shown) {
  const sources = [...new Set(shown.map((entry) => entry.statistics.pass_source))].filter((source) => source !== "none");
  return sources.length ? `pass: ${sources.join(" or ")}` : "neither acc nor scores were recorded";
}

const trends = () =>
  TRENDS.filter((chart) => chart.key !== "mismatch" || head.mismatch).map((chart) => ({ ...chart, select: showStep }));
