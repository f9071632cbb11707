// The conversation of a recorded request, as far as its body has one.
import type { Message } from "../../parts/messages";

type Body = Record<string, unknown>;

function asked(body: Body | null): Message[] | null {
  const request = body?.request as Body | undefined;
  if (!request) return null;
  if (Array.isArray(request.messages)) return request.messages as Message[];
  if (request.input !== undefined) return embedded(request.input).map((text) => ({ role: "text", content: worded(text) }));
  return request.prompt === undefined ? [] : [{ role: "prompt", content: worded(request.prompt) }];
}

/** Several, or one, which may be token ids. */
const embedded = (input: unknown): unknown[] => (Array.isArray(input) && typeof input[0] !== "number" ? input : [input]);
const worded = (given: unknown): string => (typeof given === "string" ? given : JSON.stringify(given));

function answers(body: Body | null): Message[] {
  return ((body?.choices ?? []) as Body[]).map((choice) => (choice.message ?? { role: "assistant", content: choice.text }) as Message);
}

export function saidIn(body: Body | null): Message[] | null {
  const before = asked(body);
  const all = answers(body);
  return before && [...before, ...all.map((message, place) => (all.length > 1 ? { ...message, role: `${message.role} ${place + 1}` } : message))];
}

/** What can be learned of it: the question with the answer that was given as the right one, or else with the first; null where no text was kept. */
export function exampleOf(body: Body | null, correction: string | null): { messages: Message[]; tools: unknown } | null {
  const before = asked(body);
  const given = answers(body)[0];
  const answer = correction !== null ? { role: "assistant", content: correction } : given;
  if (!before?.length || !answer || (body?.request as Body).input !== undefined) return null;
  return { messages: [...before, answer], tools: (body?.request as Body).tools };
}
