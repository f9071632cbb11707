// Tokens as texts with a number each, and colours for the numbers.

export type Token = {
  text: string;
  /** What the colour says, from -1 (bad, unlikely) over 0 to 1 (good, likely); null has none. */
  tint: number | null;
  /** The name of another colour than those of good and bad. */
  hue?: string;
  /** In italics, and quiet where it has no colour: no loss is taken here. */
  masked?: boolean;
  /** Told when somebody points at it. */
  title: string;
};

/** Likely tokens have no colour, unlikely ones more and more of it: 0 at probability 1, -1 at 0.1 % or less. */
export function tintOfLogprob(logprob: number): number {
  return Math.max(-1, logprob / 6.9);
}

/** How many of each of these lengths are within the first `most` of all. */
export function among(lengths: readonly number[], most: number): number[] {
  let left = most;
  return lengths.map((length) => {
    const count = Math.min(left, length);
    left -= count;
    return count;
  });
}

/** A token whose text cannot be seen. */
export function visible(text: string): string {
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}
