// What can be deployed: what jobs ended with, named snapshots of runs, and base models.
import type { Row } from "../../answers";
import { getAll } from "../../lib/api";
import { short } from "../../lib/format";

/** `version` is what is asked for, which of a base model is its name, `weights` what becomes live then, and `href` the page of whoever made them. */
export type Deployable = { version: string; weights: string; what: string; href: string | null; created_us: number };

/** What it is, and which weights those are. */
export function called(each: Deployable): string {
  return `${each.what} (${short(each.weights)})`;
}

/** What there is, read; of one base model where it is named. */
export async function deployables(base?: string): Promise<Deployable[]> {
  const [snapshots, runs, jobs, models] = await Promise.all([getAll("/api/v1/snapshots"), getAll("/api/v1/runs"), getAll("/api/v1/jobs", {}, { state: "succeeded" }), getAll("/api/v1/models")]);
  return deployablesOf({ snapshots, runs, jobs, models }, base);
}

type Known = { snapshots: readonly Row<"/api/v1/snapshots">[]; runs: readonly Row<"/api/v1/runs">[]; jobs: readonly Row<"/api/v1/jobs">[]; models: readonly Row<"/api/v1/models">[] };

/** The newest first. */
export function deployablesOf({ snapshots, runs, jobs, models }: Known, base?: string): Deployable[] {
  const runOf = new Map(runs.map((run) => [run.id, run]));
  const found = new Map<string, Deployable>();
  for (const job of jobs) {
    if (job.result && (!base || job.spec.base_model === base)) found.set(job.result.version, { version: job.result.version, weights: job.result.version, what: `what job ${job.spec.name} ended with`, href: `/runs/${job.id}`, created_us: job.finished_us ?? job.updated_us });
  }
  for (const snapshot of snapshots) {
    const run = runOf.get(snapshot.run_id);
    if (!snapshot.version || found.has(snapshot.version) || (base && run?.base_model !== base)) continue;
    found.set(snapshot.version, { version: snapshot.version, weights: snapshot.version, what: `snapshot ${snapshot.name} of ${run?.name ?? snapshot.run_id}, step ${snapshot.step}`, href: `/runs/${snapshot.run_id}`, created_us: snapshot.created_us });
  }
  const newest = [...found.values()].sort((a, b) => b.created_us - a.created_us);
  return [...newest, ...models.filter((model) => !base || model.alias === base).map((model) => ({ version: model.alias, weights: model.base_hash, what: `the base model ${model.alias}`, href: null, created_us: 0 }))];
}
