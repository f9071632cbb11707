// Cards of judges.
import type { Schema } from "../answers";

/** The card that a gate goes by, of those of a judge, latest first: the latest of answers, or of pairs where nobody labelled answers. */
export function gateCard(cards: readonly Schema<"Calibration">[]): Schema<"Calibration"> | undefined {
  return cards.find((card) => !card.pairs) ?? cards[0];
}
