// Evaluations, and what they came to, as the pages name them.
import type { Answer, Row, Schema } from "../../answers";
import { figure } from "../../lib/format";

export type Evaluation = Row<"/api/v1/evaluations">;
export type ModelSummary = Schema<"ModelSummary">;
export type Measured = Schema<"Measured">;
export type Item = Answer<"/api/v1/evaluations/{evaluation}/items">["data"][number];

export const labelOf = (chosen: { grader: string; version?: number | null }): string => (chosen.version ? `${chosen.grader}@${chosen.version}` : chosen.grader);

export function ended(evaluation: Evaluation): boolean {
  return evaluation.finished_us !== null;
}

/** A value with its interval, in words. */
export function said(measured: Measured | null | undefined): string {
  if (!measured) return "–";
  return measured.interval ? `${figure(measured.value)} (${figure(measured.interval[0])} to ${figure(measured.interval[1])})` : figure(measured.value);
}

/** From the least to the most that any of these reach, so that all are drawn on one axis; with room for differences on both sides of 0. */
export function axisOf(all: readonly (Measured | null | undefined)[], { around0 = false } = {}): [number, number] {
  const ends = all.flatMap((each) => (each ? [each.value, ...(each.interval ?? [])] : []));
  if (ends.length === 0) return [0, 1];
  if (around0) {
    const reach = Math.max(1e-9, ...ends.map(Math.abs));
    return [-reach, reach];
  }
  const [least, most] = [Math.min(...ends), Math.max(...ends)];
  // Most graders give 0 to 1: there the axis is the same everywhere.
  if (least >= 0 && most <= 1) return [0, 1];
  const room = (most - least || 1) * 0.05;
  return [least - room, most + room];
}
