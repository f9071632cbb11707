// Kinds of recorded requests.

/** Those that somebody was answered. */
export const SERVED = ["chat", "completion", "embedding"];

const WORDS: Record<string, string> = { sample: "sample of training" };

export function kindWords(kind: string): string {
  return WORDS[kind] ?? kind;
}
