// What spans say of a deployment's traffic.
import type { Row } from "../../answers";
import { ago, duration, several } from "../../lib/format";

type Span = Row<"/api/v1/spans">;

/** Requests and tokens of each minute up to `now`, in minutes since 1970; `x` names them in seconds, and minutes without any are zeros. */
export function perMinute(spans: readonly Span[], now: number): { x: number[]; requests: number[]; tokens: number[] } {
  if (spans.length === 0) return { x: [], requests: [], tokens: [] };
  const minute = (span: Span): number => Math.floor(span.started_us / 60e6);
  const places = spans.map(minute);
  const first = places.reduce((least, place) => Math.min(least, place));
  // The clock of the server may be ahead.
  const last = places.reduce((most, place) => Math.max(most, place), now);
  // A quarter of an hour at least, and a day at most: who looks at more minutes sees no single one.
  const from = Math.max(Math.min(first, last - 15), last - 1440);
  const requests = new Array<number>(last - from + 1).fill(0);
  const tokens = [...requests];
  spans.forEach((span, number) => {
    const place = places[number]! - from;
    if (place < 0) return;
    requests[place]! += 1;
    tokens[place]! += span.in_tokens + span.out_tokens;
  });
  return { x: requests.map((_, place) => (from + place) * 60), requests, tokens };
}

export function quantile(values: readonly number[], share: number): number | null {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]!;
}

/** Which requests these are, the newest of which `most` are read, and what time they cover; `now` in milliseconds. */
export function covered(spans: readonly Span[], most: number, now: number): string {
  const begun = spans.map((span) => span.started_us);
  const first = begun.reduce((least, each) => Math.min(least, each));
  const last = begun.reduce((latest, each) => Math.max(latest, each));
  if (spans.length === 1) return `the one request on record, ${ago(first, now)}`;
  const which = spans.length < most ? `all ${several(spans.length, "request")} on record` : `the last ${several(spans.length, "request")} alone`;
  return `${which}, which came within ${duration((last - first) / 1e6)}, the first of them ${ago(first, now)}`;
}
