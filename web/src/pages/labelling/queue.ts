// What is to be labelled, in which order: where judges disagree first, then everything else in an order that tells nothing.
import type { Row } from "../../answers";
import { textOf, type Message } from "../../parts/messages";

export type Item = Row<"/api/v1/evaluations/{evaluation}/items">;

/** One answer to pass or to fail. */
export type Single = { id: string; asked: Message[]; item: Item; spread: number };

/** Two answers to the same question by two models, in an order that tells nothing. */
export type Pair = { id: string; asked: Message[]; first: Item; second: Item; spread: number };

export function singles(items: readonly Item[]): Single[] {
  return items
    .filter((item) => !item.answer.error)
    .map((item) => ({ id: `${item.row}-${item.sample}-${item.model}`, asked: asked(item), item, spread: disagreement(item) }))
    .sort((a, b) => b.spread - a.spread || drawn(a.id) - drawn(b.id));
}

export function pairs(items: readonly Item[], one: string, other: string): Pair[] {
  const answered = items.filter((item) => !item.answer.error);
  const byPlace = new Map(answered.filter((item) => item.model === other).map((item) => [`${item.row}-${item.sample}`, item]));
  return answered
    .filter((item) => item.model === one)
    .flatMap((item): Pair[] => {
      const id = `${item.row}-${item.sample}`;
      const beside = byPlace.get(id);
      if (!beside || said(item) === said(beside)) return [];
      const [first, second] = drawn(id) < 0.5 ? [item, beside] : [beside, item];
      return [{ id, asked: asked(item), first, second, spread: ordering(item, beside) }];
    })
    .sort((a, b) => b.spread - a.spread || drawn(a.id) - drawn(b.id));
}

export function said(item: Item): string {
  return item.answer.text;
}

export function scoreOf(item: Item, grader: string): number | null {
  return item.scores.find((score) => score.grader === grader)?.result.score ?? null;
}

/** Of the graders that have a score: 1 where some pass the answer and some do not, else how far their scores are from one another. */
function disagreement(item: Item): number {
  const verdicts = new Set(item.scores.flatMap((score) => (score.passed === null ? [] : [score.passed])));
  if (verdicts.size > 1) return 1;
  const scores = item.scores.flatMap((score) => (score.result.score == null ? [] : [score.result.score]));
  return scores.length > 1 ? Math.min(0.99, Math.max(...scores) - Math.min(...scores)) : 0;
}

/** 1 where one grader prefers one answer and another the other. */
function ordering(one: Item, other: Item): number {
  const signs = new Set(
    one.scores.flatMap((score) => {
      const beside = scoreOf(other, score.grader);
      return score.result.score == null || beside === null || score.result.score === beside ? [] : [Math.sign(score.result.score - beside)];
    }),
  );
  return signs.size > 1 ? 1 : 0;
}

function asked(item: Item): Message[] {
  return item.messages.length ? (item.messages as unknown as Message[]) : [{ role: "prompt", content: textOf(item.prompt) }];
}

/** A number from 0 to 1 that a text always has: the order is the same tomorrow, and says nothing of the models. */
function drawn(text: string): number {
  let hash = 2166136261;
  for (const character of text) hash = Math.imul(hash ^ character.codePointAt(0)!, 16777619);
  hash = Math.imul(hash ^ (hash >>> 15), 2246822507);
  return ((hash ^ (hash >>> 13)) >>> 0) / 4294967296;
}
