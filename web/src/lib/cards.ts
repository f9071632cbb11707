// Which of a judge's cards counts.
import type { Schema } from "../answers";

/** As for a gate, of cards latest first: the latest of answers, or of pairs where nobody labelled answers. */
export function counting(cards: readonly Schema<"Calibration">[]): Schema<"Calibration"> | undefined {
  return cards.find((card) => !card.pairs) ?? cards[0];
}
