// What was measured at steps, as curves.

/** One measure: at step `x[i]`, at `time[i]` seconds since 1970, it was `y[i]`. Both ascend. */
export type Curve = { x: number[]; time: number[]; y: (number | null)[] };

/** All measures of a run by their names. A new object for every change, so that who shows it notices. */
export type Curves = ReadonlyMap<string, Curve>;

export type Point = { step: number; created_us: number; values: Record<string, number | null> };

/** Curves of points that come in any order, some of them again. */
export class Measured {
  curves: Curves = new Map();

  add(points: readonly Point[]): void {
    const curves = new Map(this.curves);
    let changed = false;
    for (const { step, created_us, values } of points) {
      for (const [name, value] of Object.entries(values)) {
        let curve = curves.get(name);
        if (!curve) curves.set(name, (curve = { x: [], time: [], y: [] }));
        changed = put(curve, step, created_us / 1e6, value) || changed;
      }
    }
    if (changed) this.curves = curves;
  }
}

/** Whether that changed anything. */
function put(curve: Curve, step: number, time: number, value: number | null): boolean {
  const { x, y } = curve;
  const at = place(x, step);
  if (x[at] === step) {
    if (y[at] === value) return false;
    y[at] = value;
    return true;
  }
  // A process that begins again tells of a step at another time than its neighbours say.
  const between = Math.min(Math.max(time, curve.time[at - 1] ?? time), curve.time[at] ?? Infinity);
  if (at === x.length) {
    x.push(step);
    curve.time.push(between);
    y.push(value);
  } else {
    x.splice(at, 0, step);
    curve.time.splice(at, 0, between);
    y.splice(at, 0, value);
  }
  return true;
}

/** Where a step is or would be; most come behind the last. */
function place(x: readonly number[], step: number): number {
  let low = 0;
  let high = x.length;
  if (high === 0 || x[high - 1]! < step) return high;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle]! < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What each second brought of a measure that counts, by the times at which it was told: several steps may be told of at once. */
export function perSecond({ x, time, y }: Curve): Curve {
  const rate: Curve = { x: [], time: [], y: [] };
  let since = time[0];
  let sum = 0;
  for (let i = 1; i < x.length; i++) {
    if (time[i] === since) continue;
    sum += y[i] ?? 0;
    if (time[i + 1] === time[i]) continue;
    rate.x.push(x[i]!);
    rate.time.push(time[i]!);
    rate.y.push(sum / (time[i]! - since!));
    since = time[i];
    sum = 0;
  }
  return rate;
}

/** Of steps, of which there is one, the nearest to one that may be between them. */
export function nearest(steps: readonly number[], to: number): number {
  return steps.reduce((best, step) => (Math.abs(step - to) < Math.abs(best - to) ? step : best));
}

/** The earliest time at which anything was measured. */
export function began(curves: Curves): number {
  return Math.min(...[...curves.values()].map(({ time }) => time[0] ?? Infinity));
}

/** Lines on top of each other: each is the sum of itself and of those behind it that are `shown`; what was not measured is nothing. */
export function piled(lines: readonly (readonly (number | null | undefined)[])[], shown: (place: number) => boolean): number[][] {
  const sums = (lines[0] ?? []).map(() => 0);
  return lines
    .map((line, place) => ({ line, counts: shown(place) }))
    .reverse()
    .map(({ line, counts }) => {
      if (counts) line.forEach((value, at) => (sums[at]! += value ?? 0));
      return [...sums];
    })
    .reverse();
}
