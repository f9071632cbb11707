// The conversation of a recorded request, as far as its body has one.
import type { Message } from "../../parts/messages";

type Body = Record<string, unknown>;

export function saidIn(body: Body | null): Message[] | null {
  const request = body?.request as Body | undefined;
  const choices = (body?.choices ?? []) as Body[];
  if (!request) return null;
  const asked = Array.isArray(request.messages) ? (request.messages as Message[]) : request.prompt === undefined ? [] : [{ role: "prompt", content: typeof request.prompt === "string" ? request.prompt : JSON.stringify(request.prompt) }];
  const answers = choices.map((choice, place): Message => {
    const message = (choice.message ?? { role: "assistant", content: choice.text }) as Message;
    return choices.length > 1 ? { ...message, role: `${message.role} ${place + 1}` } : message;
  });
  return [...asked, ...answers];
}
