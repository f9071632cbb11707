// Prices of tokens, and how to set one, in words.
import type { Schema } from "../../answers";
import { usdAlike } from "../../lib/format";

export type Price = Schema<"Price">;

/** In as many decimals as each of the prices beside it. */
export function priceWords(price: Price | null | undefined, beside: readonly (Price | null | undefined)[] = [price]): string {
  if (!price) return "no price";
  const say = usdAlike(beside.flatMap((each) => [each?.prompt_usd_per_mtok, each?.cached_prompt_usd_per_mtok, each?.completion_usd_per_mtok]));
  const cached = price.cached_prompt_usd_per_mtok;
  return `${say(price.prompt_usd_per_mtok)}${cached === null || cached === undefined ? "" : ` (${say(cached)} cached)`} + ${say(price.completion_usd_per_mtok)}`;
}
