// Messages as chat has them.

export type Call = { function?: { name?: string; arguments?: string } };
export type Message = { role: string; content?: unknown; name?: string; tool_calls?: Call[]; reasoning?: string; weight?: number | null };

/** What a message says, as a text: its parts one after another, and what is no text as JSON. */
export function textOf(content: unknown): string {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part: { text?: string }) => part.text ?? JSON.stringify(part)).join("");
  return JSON.stringify(content);
}
