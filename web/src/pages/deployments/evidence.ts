// Why a version went live: what is recorded of the evaluations and comparisons that are chosen, and what any evidence says, which may be of any shape.
import type { Row, Schema } from "../../answers";
import { figure, several } from "../../lib/format";
import { said, type Evaluation, type Measured } from "../evaluations/results";

export type Evidence = Record<string, unknown>;
/** What an evaluation came to for one of its models, with its figures: they are told when it has been deleted, too. */
export type Cited = { evaluation: string; name: string; model: string; scores: { grader: string; rows: number; mean: Measured }[] };
/** What a job measured of the weights that it ended with, beside those that it began with; figures and all, as above. */
export type CitedJob = { job: string; name: string; base_version: string; compared: Compared[] };
type Compared = Schema<"Compared">;
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

/** What jobs measured that ended with exactly these weights, in their order. */
export function comparisons(jobs: readonly Row<"/api/v1/jobs">[], weights: string): CitedJob[] {
  return jobs.flatMap(({ id, spec, result }) =>
    result?.version === weights && result.compared.length ? [{ job: id, name: spec.name, base_version: result.base_version, compared: result.compared }] : [],
  );
}

export function evidenceOf(evaluations: readonly Cited[], jobs: readonly CitedJob[]): Evidence {
  return { ...(evaluations.length ? { evaluations } : {}), ...(jobs.length ? { jobs } : {}) };
}

/** "0.5 (0.2 to 0.8) by right@1 on 8 rows", grader by grader. */
export function scored({ scores }: Cited): string {
  return scores.map(({ grader, rows, mean }) => `${said(mean)} by ${grader} on ${several(rows, "row")}`).join(", ") || "no score";
}

/** "loss 3 before, 0.5 after, a difference of -2.5 (-3 to -2) on 8 rows", measure by measure. */
export function differing({ compared }: CitedJob): string {
  return compared
    .map(({ name, before, after, difference, difference_interval, rows }) => `${name} ${figure(before)} before, ${figure(after)} after, a difference of ${said({ value: difference, interval: difference_interval })} on ${several(rows, "row")}`)
    .join("; ");
}

/** Evidence apart: the evaluations and jobs it names, what can be said in a few words, and the rest as it was given. */
export function told(evidence: Evidence): { evaluations: Cited[]; jobs: CitedJob[]; words: string[]; rest: Evidence } {
  const parts = { evaluations: listed(evidence.evaluations, isCited), jobs: listed(evidence.jobs, isCitedJob), words: [] as string[], rest: {} as Evidence };
  for (const [name, value] of Object.entries(evidence)) {
    if ((name === "evaluations" && value === parts.evaluations) || (name === "jobs" && value === parts.jobs)) continue;
    if (name === "mcnemar" && isSplit(value)) parts.words.push(`right where the version before was not ${times(value.gained)}, wrong where it was right ${times(value.lost)} (p = ${figure(value.p_value)})`);
    else if (["string", "number", "boolean"].includes(typeof value) && isShort(String(value))) parts.words.push(`${name}: ${value}`);
    else parts.rest[name] = value;
  }
  return parts;
}

/** The list itself where all of it is known, and else an empty one. */
const listed = <Each>(value: unknown, isKnown: (each: unknown) => each is Each): Each[] => (Array.isArray(value) && value.every(isKnown) ? value : []);
const times = (count: number): string => (count === 1 ? "once" : `${figure(count)} times`);
const isShort = (words: string): boolean => words.length <= LINE && !/\n/.test(words);
/** Of these fields and no others: what has more to say is shown as it was given. */
const isOf = (value: unknown, ...fields: string[]): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value) && Object.keys(value).sort().join() === fields.sort().join();
const isSplit = (value: unknown): value is Split => isOf(value, "gained", "lost", "p_value") && Object.values(value).every(isNumber);
const isNumber = (value: unknown): value is number => typeof value === "number";
const isInterval = (value: unknown): boolean => value === null || (Array.isArray(value) && value.length === 2 && value.every(isNumber));
const isMeasured = (value: unknown): value is Measured =>
  isOf(value, "value", "interval") && isNumber(value.value) && isInterval(value.interval);
const isCited = (value: unknown): value is Cited =>
  isOf(value, "evaluation", "name", "model", "scores") &&
  [value.evaluation, value.name, value.model].every((each) => typeof each === "string") &&
  Array.isArray(value.scores) &&
  value.scores.every((each: unknown) => isOf(each, "grader", "rows", "mean") && typeof each.grader === "string" && isNumber(each.rows) && isMeasured(each.mean));
const isCitedJob = (value: unknown): value is CitedJob =>
  isOf(value, "job", "name", "base_version", "compared") && [value.job, value.name, value.base_version].every((each) => typeof each === "string") && Array.isArray(value.compared) && value.compared.every(isCompared);
const isCompared = (value: unknown): value is Compared =>
  isOf(value, "name", "rows", "before", "after", "before_interval", "after_interval", "difference", "difference_interval", "higher_is_better") &&
  typeof value.name === "string" &&
  [value.rows, value.before, value.after, value.difference].every(isNumber) &&
  [value.before_interval, value.after_interval, value.difference_interval].every(isInterval) &&
  typeof value.higher_is_better === "boolean";
