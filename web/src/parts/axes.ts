// Axes of a chart: what is written along them, from where to where they go, and which of the values between have a mark.
import uPlot from "uplot";

import { duration } from "../lib/format";

/** How large a mark is. */
export const MARK_PX = 5;
/** Of bytes these are round numbers. */
export const DOUBLED = Array.from({ length: 50 }, (_, power) => 2 ** power);
const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
/** Of seconds these are. */
const CLOCK = [...[0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30], ...[1, 2, 5, 10, 15, 30].map((each) => each * MINUTE), ...[1, 2, 4, 12].map((each) => each * HOUR), ...[1, 2, 5, 10, 50, 100].map((each) => each * DAY)];

/** Each value has its mark where they are far apart, whatever other lines have between them. */
export function sparse(plot: uPlot, series: number, first: number, last: number): boolean {
  const values = plot.data[series]!;
  const most = plot.bbox.width / devicePixelRatio / (2 * MARK_PX);
  let count = 0;
  for (let i = first; i <= last && count <= most; i++) if (values[i] != null) count++;
  return count <= most;
}

/** Between two gaps there is no line: such a value has its mark among however many. */
export function alone(plot: uPlot, series: number, all: boolean, gaps?: number[][] | null): number[] | null {
  if (all || !gaps?.length) return null;
  const values = plot.data[series]!;
  const [first, last] = plot.series[0]!.idxs!;
  const found: number[] = [];
  for (let i = first; i <= last; i++) {
    if (values[i] != null && (i === 0 || values[i - 1] === null) && (i === values.length - 1 || values[i + 1] === null)) found.push(i);
  }
  return found;
}

/** What is always nothing is drawn at the foot, and not as if it might have been a hundred; some values are seen beside none. */
export function range(besideNone: boolean): (plot: uPlot, least: number | null, most: number | null) => uPlot.Range.MinMax {
  return (_plot, least, most) => {
    if (least === null || most === null || (least === 0 && most === 0)) return [0, 1];
    return uPlot.rangeNum(besideNone ? 0 : least, most, 0.1, true);
  };
}

/** Steps on a logarithmic axis, to where one digit says where it ends. */
export function rounded(_plot: uPlot, least: number | null, most: number | null): uPlot.Range.MinMax {
  if (least === null || most === null) return [null, null];
  const [low, high] = [least, most].map((each) => 10 ** Math.floor(Math.log10(each))) as [number, number];
  const [first, last] = [Math.floor(least / low) * low, Math.ceil(most / high) * high];
  return [first, first < last ? last : 2 * last];
}

/** The axis of steps, which may be logarithmic, or of time. */
export function along({ times, elapsed, log }: { times: boolean; elapsed: boolean; log: boolean }): uPlot.Axis {
  if (elapsed) return { space: 80, size: 30, incrs: CLOCK, values: (_plot, ticks) => ticks.map((tick) => duration(tick)) };
  if (times) return { space: 60, size: 46 };
  return { space: 60, size: 30, ...(log ? {} : { incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 2.5e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7] }) };
}
