// Which measures are looked at together, in the order in which one asks for them.

import { bytes, percent } from "../../lib/format";
import { perSecond, type Curves } from "../../lib/points";

/** Of what tells the tokens of each step and nothing of its pace. */
const RATE = "tokens a second";
/** 10 behind 9. */
const BY_NUMBER = new Intl.Collator("en", { numeric: true });

export type Measures = {
  title: string;
  /** Names, or what names begin with where they end in a star. */
  names: readonly string[];
  help: string;
  /** Whether they are bytes. */
  inBytes?: boolean;
  /** Whether they are shares of one whole, which is drawn. */
  stacked?: boolean;
  /** What all steps of a run come to, where that says more than a curve. */
  total?: (curves: Curves) => string;
};

export const GROUPS: readonly Measures[] = [
  { title: "Loss", names: ["loss", "evaluation/loss"], help: "of the rows trained on, and of held-out ones" },
  { title: "Reward", names: ["reward/raw", "reward/filtered", "evaluation/reward", "served/reward", "reward/held_out"], help: "of all rollouts, of those that were trained on, of held-out prompts, and by the grader that nothing is trained on; with the 95 % interval of the mean" },
  { title: "Reward by component", names: ["reward/part/*", "reward/turns"], help: "means of the parts that graders gave, and of what agents were given at their turns" },
  { title: "Spread of rewards", names: ["reward/group_std"], help: "standard deviation within groups" },
  { title: "Preferences", names: ["margin", "accuracy", "evaluation/margin", "evaluation/accuracy", "served/margin", "served/prefers", "rewards/chosen", "rewards/rejected"], help: "how much likelier the preferred answer is, and how often" },
  { title: "Distance to the beginning", names: ["kl/reference", "kl/teacher", "evaluation/kl/teacher", "served/kl/teacher"], help: "in nats a token, to the weights that training began with or to the teacher" },
  { title: "Trainer and sampler", names: ["ratio/k3", "ratio/largest_difference"], help: "how far the trainer's numbers are from those sampled with: 0 where bits are promised" },
  { title: "Importance ratio", names: ["ratio/mean"], help: "mean of what the trained weights say of a token by what the ratio begins from says" },
  { title: "Rollouts and anchor", names: ["staleness/*"], help: "how far rollouts are from the weights that ratios begin from: mean ratio, k3, and share of tokens whose ratio was capped" },
  { title: "Agreement", names: ["agreement/held_share", "agreement/drawn_deviation"], help: "share of groups that were scored once more, and how often the likeliest token came, in standard errors beyond what is expected" },
  { title: "Tokens held to agreement", names: ["agreement/scored_tokens", "agreement/trainer_tokens"], help: "tokens that were scored once more, by what serves them and by the trainer" },
  { title: "Entropy", names: ["rollouts/entropy_estimate"], help: "mean of minus the log-probability of what was sampled" },
  { title: "Length", names: ["rollouts/length"], help: "tokens of an answer" },
  { title: "Shares of rollouts", names: ["groups/zero_variance_share", "ratio/clipped_share", "rollouts/cut_off_share", "lag/masked_share", "grading/invalid_share", "rollouts/of_several_versions_share"], help: "groups rewarded alike, clipped tokens, answers cut off, tokens too old to train on, calls of the grader without a score" },
  { title: "Staleness", names: ["lag/mean", "lag/max"], help: "versions between what sampled a token and what was trained" },
  { title: "Tokens by staleness", names: ["lag/tokens/*"], help: "how many tokens of a step were sampled so many versions ago", stacked: true },
  { title: "Grading", names: ["grading/seconds_mean", "grading/seconds_max"], help: "seconds that a call of the grader or the agent took" },
  { title: "Agents", names: ["agents/*"], help: "answers and segments of a rollout, and share of rollouts in which an answer was told otherwise than it was sampled" },
  { title: "Throughput", names: ["tokens/trained_per_s", "tokens/sampled_per_s", RATE], help: "tokens a second" },
  { title: "Idle", names: ["idle/trainer_share", "idle/rollouts_share", "overlap/share"], help: "share of the wall time in which one waited for the other, and in which both worked" },
  { title: "Seconds of a step", names: ["seconds/step", "seconds/rollouts", "seconds/training", "seconds/publishing", "seconds/evaluation", "sync/seconds"], help: "wall time; publishing is the wait for the version behind its update" },
  { title: "Versions that travelled", names: ["sync/bytes", "sync/whole_bytes"], help: "bytes that lead to each version from the one before it, and those of all its weights", inBytes: true, total: travelled },
  { title: "Changed by a step", names: ["sync/changed", "sync/delta"], help: "share of the elements that differ from the version before; and 1 where only those travelled, 0 where all did" },
  { title: "Bytes by codec", names: ["sync/raw_bytes", "sync/fast_bytes", "sync/fast_zstd_bytes", "sync/tight_bytes", "sync/planes_bytes"], help: "of what travelled, by how it was written", inBytes: true },
  { title: "Learning rate", names: ["learning_rate"], help: "of the step" },
  { title: "Gradient norm", names: ["gradient_norm", "grad_norm"], help: "before it is clipped" },
  { title: "Exact answers", names: ["served/exact", "evaluation/exact"], help: "held-out rows that were answered as they are" },
  { title: "Failures", names: ["failures/*"], help: "rollouts without a reward, and attempts that were repeated" },
];

/** With the pace, where it was not measured and can be told by when each step was. */
export function withRate(curves: Curves): Curves {
  const tokens = curves.get("tokens");
  if (!tokens || curves.has("tokens/trained_per_s") || curves.has("tokens/sampled_per_s")) return curves;
  const rate = perSecond(tokens);
  return rate.x.length > 0 ? new Map(curves).set(RATE, rate) : curves;
}

/** What the versions of all steps took, beside their weights. */
function travelled(curves: Curves): string {
  const sum = (name: string): number => (curves.get(name)?.y ?? []).reduce<number>((all, each) => all + (each ?? 0), 0);
  const whole = sum("sync/whole_bytes");
  return whole === 0 ? "" : `${bytes(sum("sync/bytes"))} of ${bytes(whole)}, ${percent(sum("sync/bytes") / whole)}`;
}

/** What the ends of the interval of a measure are called. */
export function ends(name: string): readonly [low: string, high: string] {
  return [`${name}_low`, `${name}_high`];
}

/** Of the names that there are those of a group. The ends of an interval are drawn with what they are of. */
export function ofGroup(group: Measures, names: Iterable<string>): string[] {
  const there = [...names];
  const alone = withoutEnds(there);
  return group.names.flatMap((name) => (name.endsWith("*") ? alone.filter((each) => each.startsWith(name.slice(0, -1))).sort(BY_NUMBER.compare) : there.includes(name) ? [name] : []));
}

/** What is in no group. */
export function others(names: Iterable<string>): string[] {
  const there = [...names];
  const grouped = new Set(GROUPS.flatMap((group) => ofGroup(group, there)));
  return withoutEnds(there).filter((name) => !grouped.has(name)).sort();
}

function withoutEnds(names: readonly string[]): string[] {
  const there = new Set(names);
  const drawn = new Set(names.flatMap((name) => (ends(name).every((end) => there.has(end)) ? ends(name) : [])));
  return names.filter((name) => !drawn.has(name));
}
