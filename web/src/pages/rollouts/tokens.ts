// Tokens of a rollout in the colour that is asked for.
import type { Schema } from "../../answers";
import { figure, percent, short } from "../../lib/format";
import { tintOfLogprob, type Token } from "../../parts/tokens";

export const COLOURS = ["log-probability", "advantage", "loss mask", "version"] as const;
export type Colour = (typeof COLOURS)[number];

/** How many colours there are of versions, and how much of its colour a token has. */
const HUES = 8;
export const OF_VERSION = 0.75;

type Segment = Schema<"RolloutSegment">;

/** The versions by which the segments were sampled, in the order in which they come. */
export function versionsOf(segments: readonly Segment[]): string[] {
  return [...new Set(segments.flatMap((segment) => segment.versions.map(([, , version]) => version)))];
}

/** The colour of a version among those of its rollout: neighbours have different ones. */
export function hueOf(version: string, versions: readonly string[]): string {
  return `--series-${(versions.indexOf(version) % HUES) + 1}`;
}

/** The first `count` tokens of a segment; `versions` are those of its rollout. */
export function tokensOf(segment: Segment, colour: Colour, count: number, versions: readonly string[]): Token[] {
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
    const coloured = colour === "version" ? (version ? { tint: OF_VERSION, hue: hueOf(version, versions) } : { tint: null }) : { tint: tint(colour, logprob, advantage, trained, largest) };
    return { text: segment.texts?.[place] ?? `⟨${token}⟩`, ...coloured, masked: !trained, title: said.filter(Boolean).join("\n") };
  });
}

function tint(colour: Exclude<Colour, "version">, logprob: number | null, advantage: number | null, trained: boolean, largest: number): number | null {
  if (colour === "loss mask") return trained ? 0.6 : null;
  if (colour === "advantage") return advantage === null ? null : advantage / largest;
  return logprob === null ? null : tintOfLogprob(logprob);
}
