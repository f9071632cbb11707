// What is shown of an axis, and what keys make of it.

export type Span = { min: number; max: number };

/** What an arrow moves by, of what is shown. */
const MOVED = 0.25;

/** What a key shows next of `whole`, where `shown` is shown now, and no less than `least`; undefined where it changes nothing. */
export function keyed(key: string, shown: Span, whole: Span, least: number): Span | undefined {
  const next = wanted(key, shown, whole, least);
  return next && (next.min !== shown.min || next.max !== shown.max) ? next : undefined;
}

function wanted(key: string, shown: Span, whole: Span, least: number): Span | undefined {
  const size = shown.max - shown.min;
  switch (key) {
    case "+":
    case "=":
      return around(shown, Math.max(size / 2, Math.min(least, size)), whole);
    case "-":
      return around(shown, size * 2, whole);
    case "ArrowLeft":
      return beginning(shown.min - size * MOVED, size, whole);
    case "ArrowRight":
      return beginning(shown.min + size * MOVED, size, whole);
    case "0":
    case "Home":
      return whole;
  }
}

/** As much around the same middle. */
function around({ min, max }: Span, size: number, whole: Span): Span {
  return beginning((min + max - size) / 2, size, whole);
}

/** What begins there, or as near to it as it is inside the whole. */
function beginning(min: number, size: number, whole: Span): Span {
  if (size >= whole.max - whole.min) return whole;
  if (min + size >= whole.max) return { min: whole.max - size, max: whole.max };
  const first = Math.max(min, whole.min);
  return { min: first, max: first + size };
}
