// What runs and jobs measured, by step: read once, and then what is new or came late.
import { untrack } from "svelte";

import { get } from "./api";
import { reading, type Reading } from "./live.svelte";
import { Measured, type Curves, type Point } from "./points";

export type { Curve, Curves } from "./points";

/** A step may be measured further when training has long left it: what is read again each time, in steps of a job. */
const LOOK_BACK = 64;

/** The measures of each of these jobs (`job_...`) and runs, by id, kept up to date. A job that `ended` meanwhile is read as a whole once more. */
export function curvesOf(ids: () => readonly string[], ended: (id: string) => boolean | undefined = () => undefined): Reading<ReadonlyMap<string, Curves>> {
  const known = new Map<string, Known>();
  let told: ReadonlyMap<string, Curves> = new Map();
  // As text, so that the same again is no change.
  const wanted = $derived(JSON.stringify(ids().map((id) => [id, ended(id) ?? null])));
  return reading(
    async () => {
      const each = JSON.parse(wanted) as [string, boolean | null][];
      const curves = new Map(await untrack(() => Promise.all(each.map(async ([id, over]) => [id, await readOn(id, over, known)] as const))));
      // Nothing is drawn again for nothing.
      if (curves.size !== told.size || [...curves].some(([id, those]) => told.get(id) !== those)) told = curves;
      return told;
    },
    "points",
    "runs",
    "jobs",
  );
}

class Known {
  readonly measured = new Measured();
  /** The last step of a job, or operation of a run. */
  last = -1;
  /** Whether it has ended; null: that was never told. */
  over: boolean | null = null;
  /** What is under way; of one run nothing is read twice at a time. */
  reading: Promise<unknown> = Promise.resolve();
}

async function readOn(id: string, over: boolean | null, all: Map<string, Known>): Promise<Curves> {
  let known = all.get(id);
  if (!known) all.set(id, (known = new Known()));
  const whole = over === true && known.over === false;
  known.over = over ?? known.over;
  const next = known.reading.then(() => readBehind(id, known, whole));
  known.reading = next.catch(() => {
    // Else the end of a job that could not be read would never be.
    if (whole) known.over = false;
  });
  await next;
  return known.measured.curves;
}

async function readBehind(id: string, known: Known, whole: boolean): Promise<void> {
  let after = whole ? -1 : isJob(id) ? Math.max(-1, known.last - LOOK_BACK) : known.last;
  for (let more = true; more; ) {
    const { points, last } = await read(id, after);
    known.measured.add(points);
    more = points.length > 0 && last !== known.last;
    after = last;
    known.last = Math.max(known.last, last);
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
