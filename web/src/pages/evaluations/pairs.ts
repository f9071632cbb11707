// Two models beside each other, answer by answer.
import { get } from "../../lib/api";
import { textOf } from "../../parts/messages";
import type { Item } from "./results";

/** Answers of one model in one evaluation. */
export type Side = { key: string; title: string; evaluation: string; model: string };

export type Pair = {
  key: string;
  row: number;
  sample: number;
  one: Item | undefined;
  other: Item | undefined;
  /** By the chosen grader; null: no score. */
  scores: [number | null, number | null];
  /** How much better the first is; null where one of them has no score. */
  difference: number | null;
};

export type Show = "all" | "better" | "worse" | "differ" | "invalid";

/** Of one model; more are not compared in the page. */
export const MOST = 5000;
const PAGE = 500;

/** Answers of an evaluation, of one of its models or of all: up to `most`, and whether there are more. */
export async function itemsOf({ evaluation, model }: { evaluation: string; model?: string }, most = MOST): Promise<{ items: Item[]; cut: boolean }> {
  const items: Item[] = [];
  for (let after = -1, more = true; more; ) {
    const page = await get("/api/v1/evaluations/{evaluation}/items", { evaluation }, { model, after, limit: PAGE });
    items.push(...page.data);
    after = page.data.at(-1)?.number ?? after;
    more = page.has_more && page.data.length > 0;
    if (more && items.length >= most) return { items, cut: true };
  }
  return { items, cut: false };
}

export function scoreOf(item: Item | undefined, grader: string): number | null {
  return item?.scores.find((score) => score.grader === grader)?.result.score ?? null;
}

/** Pairs of answers to the same question, those first where they differ most and those without a score last; of one model alone the worst first. */
export function pairsOf(one: readonly Item[], other: readonly Item[] | null, grader: string): Pair[] {
  const keyOf = (item: Item): string => `${item.row}.${item.sample}`;
  const others = new Map((other ?? []).map((item) => [keyOf(item), item]));
  const mine = new Map(one.map((item) => [keyOf(item), item]));
  const keys = other === null ? [...mine.keys()] : [...new Set([...mine.keys(), ...others.keys()])];
  const pairs = keys.map((key): Pair => {
    const [first, second] = [mine.get(key), others.get(key)];
    const scores: Pair["scores"] = [scoreOf(first, grader), scoreOf(second, grader)];
    const difference = scores[0] === null || scores[1] === null ? null : scores[0] - scores[1];
    const some = (first ?? second)!;
    return { key, row: some.row, sample: some.sample, one: first, other: second, scores, difference };
  });
  const weight = (pair: Pair): number => (other === null ? -(pair.scores[0] ?? Infinity) : pair.difference === null ? -1 : Math.abs(pair.difference));
  return pairs.sort((a, b) => weight(b) - weight(a) || a.row - b.row || a.sample - b.sample);
}

export function shown(pair: Pair, show: Show, alone: boolean): boolean {
  if (show === "invalid") return pair.scores[0] === null || (!alone && pair.scores[1] === null);
  if (alone || show === "all") return true;
  if (pair.difference === null) return false;
  return show === "better" ? pair.difference > 0 : show === "worse" ? pair.difference < 0 : pair.difference !== 0;
}

/** What was asked, in a line. */
export function askedIn(pair: Pair): string {
  const item = pair.one ?? pair.other;
  return (item?.prompt ?? textOf(item?.messages.at(-1)?.content)).slice(0, 200).replace(/\s+/g, " ");
}

export type Together = { better: number; worse: number; alike: number; rows: number; mean: number };

/** What pairs come to, those that both have a score for. */
export function together(pairs: readonly Pair[]): Together {
  const differences = pairs.flatMap(({ difference }) => (difference === null ? [] : [difference]));
  const count = (holds: (difference: number) => boolean): number => differences.filter(holds).length;
  const sum = differences.reduce((all, each) => all + each, 0);
  return { better: count((each) => each > 0), worse: count((each) => each < 0), alike: count((each) => each === 0), rows: differences.length, mean: differences.length ? sum / differences.length : NaN };
}
