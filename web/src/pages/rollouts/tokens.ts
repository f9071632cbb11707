// Tokens of a rollout in the colour that is asked for.
import type { Schema } from "../../answers";
import { figure, percent, short } from "../../lib/format";
import { tintOfLogprob, type Token } from "../../parts/tokens";

export const COLOURS = ["log-probability", "advantage", "loss mask"] as const;
export type Colour = (typeof COLOURS)[number];

type Segment = Schema<"RolloutSegment">;

/** How many tokens of each segment are within the first `most` of all. */
export function beginning(segments: readonly Segment[], most: number): number[] {
  let left = most;
  return segments.map(({ tokens }) => {
    const count = Math.min(left, tokens.length);
    left -= count;
    return count;
  });
}

/** The first `count` tokens of a segment. */
export function tokensOf(segment: Segment, colour: Colour, count: number): Token[] {
  // The colours of advantages are by the largest of the segment: their size depends on how rewards are scaled.
  const largest = segment.advantages.reduce<number>((most, each) => Math.max(most, Math.abs(each ?? 0)), 0) || 1;
  return segment.tokens.slice(0, count).map((token, place): Token => {
    const logprob = segment.logprobs[place] ?? null;
    const advantage = segment.advantages[place] ?? null;
    const trained = Boolean(segment.trained[place]);
    const version = segment.versions.find(([from, to]) => from <= place && place < to)?.[2];
    const said = [
      segment.sampled[place] ? `token ${token}, sampled` : `token ${token}, not sampled: put in between`,
      logprob === null ? "" : `log-probability ${figure(logprob)}, ${percent(Math.exp(logprob))}`,
      advantage === null ? "" : `advantage ${figure(advantage)}`,
      trained ? "trained on" : "no loss here",
      version ? `version ${short(version)}` : "",
    ];
    return { text: segment.texts?.[place] ?? `⟨${token}⟩`, tint: tint(colour, logprob, advantage, trained, largest), masked: !trained, title: said.filter(Boolean).join("\n") };
  });
}

function tint(colour: Colour, logprob: number | null, advantage: number | null, trained: boolean, largest: number): number | null {
  if (colour === "loss mask") return trained ? 0.6 : null;
  if (colour === "advantage") return advantage === null ? null : advantage / largest;
  return logprob === null ? null : tintOfLogprob(logprob);
}
