// A training is a job, or a run that a program drives: one list of both.
import { getAll } from "../../lib/api";
import { isJob } from "../../lib/curves.svelte";
import type { Row } from "../../answers";

export type Job = Row<"/api/v1/jobs">;
export type Run = Row<"/api/v1/runs">;

export type Training = {
  id: string;
  name: string;
  /** The method of a job, "program" of what a program trains. */
  method: string;
  base: string;
  trains: string;
  state: string;
  step: number;
  steps: number | null;
  tokens: number | null;
  created_us: number;
  job: Job | null;
};

export async function trainings(most?: number): Promise<Training[]> {
  return trainingsOf(await jobsAndRuns(most));
}

export async function jobsAndRuns(most = 2000): Promise<{ jobs: Job[]; runs: Run[] }> {
  const [jobs, runs] = await Promise.all([getAll("/api/v1/jobs", {}, {}, most), getAll("/api/v1/runs", {}, {}, most)]);
  return { jobs, runs };
}

export function trainingsOf({ jobs, runs }: { jobs: readonly Job[]; runs: readonly Run[] }): Training[] {
  const ofJobs = new Set(jobs.map((job) => job.run));
  const all = [...jobs.map(ofJob), ...runs.filter((run) => !ofJobs.has(run.id)).map(ofRun)];
  return all.sort((a, b) => b.created_us - a.created_us);
}

export function ofJob(job: Job): Training {
  const { spec, progress } = job;
  return {
    id: job.id,
    name: spec.name,
    method: spec.method.kind,
    base: spec.base_model,
    trains: trained(spec.rank),
    state: job.state,
    step: progress.step,
    steps: progress.steps || null,
    tokens: progress.tokens,
    created_us: job.created_us,
    job,
  };
}

export function ofRun(run: Run): Training {
  return {
    id: run.id,
    name: run.name ?? run.id,
    method: "program",
    base: run.base_model,
    trains: trained(run.rank),
    state: run.state,
    step: run.step,
    steps: null,
    tokens: null,
    created_us: run.created_us,
    job: null,
  };
}

/** The job whose run it is: its process wrote that there. A program may have written anything. */
export function jobOf(run: { metadata: Record<string, string> } | null | undefined): string | undefined {
  const job = run?.metadata.job;
  return job && isJob(job) ? job : undefined;
}

/** Whether a job has ended, where one is known. */
export function ended(job: Job | null | undefined): boolean | undefined {
  return job ? job.finished_us !== null : undefined;
}

export function trained(rank: number): string {
  return rank === 0 ? "all parameters" : `rank ${rank}`;
}
