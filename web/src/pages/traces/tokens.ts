// The tokens of a recorded request: as ids with log-probabilities in its body, as texts beside it.
import type { Answer } from "../../answers";
import { figure, percent } from "../../lib/format";
import { tintOfLogprob, type Token } from "../../parts/tokens";

/** What the body keeps, which the document leaves open. */
type Kept = { prompt: number[]; samples: { tokens: number[]; logprobs: (number | null)[] }[] };

/** The prompt, or an answer. */
export type Part = { role: string; tokens: Token[] };

/** Null where none were kept. */
export function bodyTokens({ body, texts }: Answer<"/api/v1/spans/{span_id}">): Part[] | null {
  const kept = body?.tokens as Kept | null | undefined;
  if (!kept) return null;
  const said = (token: number, text: string | undefined): string => text ?? `⟨${token}⟩`;
  const prompt = kept.prompt.map((token, place): Token => ({ text: said(token, texts?.prompt[place]), tint: null, masked: true, title: `token ${token}, not sampled` }));
  const answers = kept.samples.map(({ tokens, logprobs }, number): Part => ({
    role: kept.samples.length > 1 ? `answer ${number + 1}` : "answer",
    tokens: tokens.map((token, place): Token => {
      const logprob = logprobs[place] ?? null;
      const likely = logprob === null ? [] : [`log-probability ${figure(logprob)}, ${percent(Math.exp(logprob))}`];
      return { text: said(token, texts?.samples[number]?.[place]), tint: logprob === null ? null : tintOfLogprob(logprob), title: [`token ${token}, sampled`, ...likely].join("\n") };
    }),
  }));
  return [{ role: "prompt", tokens: prompt }, ...answers];
}
