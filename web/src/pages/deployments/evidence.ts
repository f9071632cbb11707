// Why a version went live: what is recorded of the evaluations that are chosen, and what any evidence says, which may be of any shape.
import { figure, several } from "../../lib/format";
import { said, type Evaluation, type Measured } from "../evaluations/results";

export type Evidence = Record<string, unknown>;
/** What an evaluation came to for one of its models, with its figures: they are told when it has been deleted, too. */
export type Cited = { evaluation: string; name: string; model: string; scores: { grader: string; rows: number; mean: Measured }[] };
/** Letters that are read at a glance. */
const LINE = 200;
type Split = { gained: number; lost: number; p_value: number };

/** What finished evaluations say of these weights, in their order. */
export function citable(evaluations: readonly Evaluation[], weights: string): Cited[] {
  return evaluations.flatMap(({ id, spec, result }) =>
    (result?.models ?? [])
      .filter(({ version }) => version === weights)
      .map(({ model, graders }) => ({ evaluation: id, name: spec.name, model, scores: graders.flatMap(({ grader, rows, mean }) => (mean ? [{ grader, rows, mean }] : [])) })),
  );
}

export function evidenceOf(chosen: readonly Cited[]): Evidence {
  return chosen.length ? { evaluations: chosen } : {};
}

/** "0.5 (0.2 to 0.8) by right@1 on 8 rows", grader by grader. */
export function scored({ scores }: Cited): string {
  return scores.map(({ grader, rows, mean }) => `${said(mean)} by ${grader} on ${several(rows, "row")}`).join(", ") || "no score";
}

/** Evidence apart: the evaluations it names, what can be said in a few words, and the rest as it was given. */
export function told(evidence: Evidence): { evaluations: Cited[]; words: string[]; rest: Evidence } {
  const { evaluations, ...others } = evidence;
  const known = Array.isArray(evaluations) && evaluations.every(isCited);
  const words: string[] = [];
  const rest: Evidence = known || evaluations === undefined ? {} : { evaluations };
  for (const [name, value] of Object.entries(others)) {
    if (name === "mcnemar" && isSplit(value)) words.push(`right where the version before was not ${times(value.gained)}, wrong where it was right ${times(value.lost)} (p = ${figure(value.p_value)})`);
    else if (["string", "number", "boolean"].includes(typeof value) && isShort(String(value))) words.push(`${name}: ${value}`);
    else rest[name] = value;
  }
  return { evaluations: known ? evaluations : [], words, rest };
}

const times = (count: number): string => (count === 1 ? "once" : `${figure(count)} times`);
const isShort = (words: string): boolean => words.length <= LINE && !/\n/.test(words);
/** Of these fields and no others: what has more to say is shown as it was given. */
const isOf = (value: unknown, ...fields: string[]): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value) && Object.keys(value).sort().join() === fields.sort().join();
const isSplit = (value: unknown): value is Split => isOf(value, "gained", "lost", "p_value") && Object.values(value).every((each) => typeof each === "number");
const isMeasured = (value: unknown): value is Measured =>
  isOf(value, "value", "interval") && typeof value.value === "number" && (value.interval === null || (Array.isArray(value.interval) && value.interval.length === 2 && value.interval.every((end) => typeof end === "number")));
const isCited = (value: unknown): value is Cited =>
  isOf(value, "evaluation", "name", "model", "scores") &&
  [value.evaluation, value.name, value.model].every((each) => typeof each === "string") &&
  Array.isArray(value.scores) &&
  value.scores.every((each: unknown) => isOf(each, "grader", "rows", "mean") && typeof each.grader === "string" && typeof each.rows === "number" && isMeasured(each.mean));
