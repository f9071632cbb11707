// Prices of tokens, and how to set one, in words.
import type { Schema } from "../../answers";

export type Price = Schema<"Price">;

export function priceWords(price: Price | null | undefined): string {
  if (!price) return "no price";
  const cached = price.cached_prompt_usd_per_mtok;
  return `$${price.prompt_usd_per_mtok}${cached === null || cached === undefined ? "" : ` ($${cached} cached)`} + $${price.completion_usd_per_mtok}`;
}
