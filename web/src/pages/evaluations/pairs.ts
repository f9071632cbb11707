// Two models beside each other, row by row, as the API pairs them; and the answers that stand behind a row.
import type { Schema } from "../../answers";
import { get } from "../../lib/api";
import type { Item } from "./results";

/** Answers of one model in one evaluation. */
export type Side = { key: string; title: string; evaluation: string; model: string };

export type Pair = Schema<"PairedRow">;
export type Show = "all" | "better" | "worse" | "alike" | "differ" | "unscored";
export type Paired = { together: Schema<"PairedRows">; rows: Pair[] };

/** Rows that the page lists; what they come to is of all. */
export const MOST = 10_000;
const PAGE = 500;

/** Where two models differ most first, or the lowest scores of one alone. */
export async function pairsOf(one: Side, other: Side | null, grader: string, show: Show): Promise<Paired> {
  const beside = other ? { other: other.model, against: other.evaluation } : {};
  const query = { model: one.model, ...beside, grader, show, order: other ? "apart" : "worse", limit: PAGE };
  const read = (offset: number): Promise<Schema<"PairedRows">> => get("/api/v1/evaluations/{evaluation}/pairs", { evaluation: one.evaluation }, { ...query, offset });
  const together = await read(0);
  // While an evaluation runs rows change places: one may be on two pages.
  const rows = new Map(together.data.map((pair) => [pair.row, pair]));
  for (let offset = together.data.length, more = together.has_more; more && offset < MOST; ) {
    const page = await read(offset);
    for (const pair of page.data) rows.set(pair.row, pair);
    offset += page.data.length;
    more = page.has_more && page.data.length > 0;
  }
  return { together, rows: [...rows.values()] };
}

/** One answer by its number; undefined where there is none. */
export async function answerOf(side: Side, number: number | undefined): Promise<Item | undefined> {
  if (number === undefined) return undefined;
  const page = await get("/api/v1/evaluations/{evaluation}/items", { evaluation: side.evaluation }, { after: number - 1, limit: 1 });
  return page.data.find((item) => item.number === number);
}

/** Answers of an evaluation: up to `most`, and whether there are more. */
export async function itemsOf(evaluation: string, most: number): Promise<{ items: Item[]; cut: boolean }> {
  const items: Item[] = [];
  for (let after = -1, more = true; more; ) {
    const page = await get("/api/v1/evaluations/{evaluation}/items", { evaluation }, { after, limit: PAGE });
    items.push(...page.data);
    after = page.data.at(-1)?.number ?? after;
    more = page.has_more && page.data.length > 0;
    if (more && items.length >= most) return { items, cut: true };
  }
  return { items, cut: false };
}

/** Whether a difference may be chance, in words, by the test that the server made. */
export function chance({ test, p_value }: Schema<"PairedRows">): string {
  if (p_value === null || test === null) return "";
  const p = p_value < 0.001 ? "p < 0.001" : `p = ${p_value.toFixed(3)}`;
  return `${p}, by ${test === "mcnemar" ? "McNemar's exact test" : "the exact sign test"}`;
}
