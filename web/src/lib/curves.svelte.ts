// What runs and jobs measured, by step: read once, and then only what is new.
import { untrack } from "svelte";

import { get } from "./api";
import { reading, type Reading } from "./live.svelte";

/** One measure: at step `x[i]`, at `time[i]` seconds since 1970, it was `y[i]`. */
export type Curve = { x: number[]; time: number[]; y: (number | null)[] };

/** All measures of a run by their names. A new object for every change, so that who shows it notices. */
export type Curves = ReadonlyMap<string, Curve>;

type Point = { step: number; created_us: number; values: Record<string, number | null> };

class Known {
  curves = new Map<string, Curve>();
  after = -1;

  add(points: readonly Point[], after: number): void {
    for (const { step, created_us, values } of points) {
      for (const [name, value] of Object.entries(values)) {
        let curve = this.curves.get(name);
        if (!curve) this.curves.set(name, (curve = { x: [], time: [], y: [] }));
        curve.x.push(step);
        curve.time.push(created_us / 1e6);
        curve.y.push(value);
      }
    }
    this.after = after;
    this.curves = new Map(this.curves);
  }
}

/** The measures of each of these jobs (`job_...`) and runs, by id, kept up to date. */
export function curvesOf(ids: () => readonly string[]): Reading<ReadonlyMap<string, Curves>> {
  const known = new Map<string, Known>();
  return reading(
    async () => {
      const wanted = ids();
      await untrack(() => Promise.all(wanted.map((id) => readOn(id, known))));
      return new Map(wanted.map((id) => [id, known.get(id)!.curves]));
    },
    "points",
    "runs",
    "jobs",
  );
}

async function readOn(id: string, all: Map<string, Known>): Promise<void> {
  let known = all.get(id);
  if (!known) all.set(id, (known = new Known()));
  for (let more = true; more; ) {
    const { after } = known;
    const behind = await read(id, after);
    if (known.after !== after) return; // somebody else has read on meanwhile
    more = behind.points.length > 0;
    if (more) known.add(behind.points, behind.last);
  }
}

async function read(id: string, after: number): Promise<{ points: readonly Point[]; last: number }> {
  if (isJob(id)) {
    const { data } = await get("/api/v1/jobs/{job}/points", { job: id }, { after });
    return { points: data, last: data.at(-1)?.step ?? after };
  }
  const { data } = await get("/api/v1/runs/{run_id}/metrics", { run_id: id }, { after });
  return { points: data, last: data.at(-1)?.seq ?? after };
}

export function isJob(id: string): boolean {
  return id.startsWith("job");
}

/** Each value drawn towards those before it: `weight` of what was, the rest of what is; gaps stay gaps. */
export function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return values as (number | null)[];
  // What the average begins with is nothing, so it is divided by how much of it there is.
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}
