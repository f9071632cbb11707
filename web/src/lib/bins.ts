// How the bins of a spread are called.
import type { Schema } from "../answers";
import { figure } from "./format";

/** Which values each bin holds; those of whole numbers by the whole numbers in it. */
export function binNames({ low, high, width, counts }: Schema<"Histogram">): string[] {
  if (counts.length === 1) return [figure(low)];
  const edge = (place: number): number => low + width * place;
  // The bins of others end with the greatest.
  const whole = Number.isInteger(low) && Number.isInteger(width) && edge(counts.length) > high;
  return counts.map((_, place) => {
    const last = whole ? Math.min(edge(place + 1) - 1, high) : place + 1 < counts.length ? edge(place + 1) : high;
    return last === edge(place) ? figure(last) : `${figure(edge(place))} to ${figure(last)}`;
  });
}
