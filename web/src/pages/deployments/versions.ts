// What can be deployed: what jobs ended with, named snapshots of runs, and base models.
import { getAll } from "../../lib/api";

export type Deployable = { version: string; what: string; created_us: number };

/** The newest first; of one base model where it is named. */
export async function deployables(base?: string): Promise<Deployable[]> {
  const [snapshots, runs, jobs, models] = await Promise.all([getAll("/api/v1/snapshots"), getAll("/api/v1/runs"), getAll("/api/v1/jobs", {}, { state: "succeeded" }), getAll("/api/v1/models")]);
  const runOf = new Map(runs.map((run) => [run.id, run]));
  const found = new Map<string, Deployable>();
  for (const job of jobs) {
    if (job.result && (!base || job.spec.base_model === base)) found.set(job.result.version, { version: job.result.version, what: `what job ${job.spec.name} ended with`, created_us: job.finished_us ?? job.updated_us });
  }
  for (const snapshot of snapshots) {
    const run = runOf.get(snapshot.run_id);
    if (!snapshot.version || found.has(snapshot.version) || (base && run?.base_model !== base)) continue;
    found.set(snapshot.version, { version: snapshot.version, what: `snapshot ${snapshot.name} of ${run?.name ?? snapshot.run_id}, step ${snapshot.step}`, created_us: snapshot.created_us });
  }
  const newest = [...found.values()].sort((a, b) => b.created_us - a.created_us);
  return [...newest, ...models.filter((model) => !base || model.alias === base).map((model) => ({ version: model.alias, what: `the base model ${model.alias}`, created_us: 0 }))];
}
