// A conversation with one model. What it says comes token by token.
import { send } from "../../lib/api";
import { figure, percent } from "../../lib/format";
import type { Message } from "../../parts/messages";
import { tintOfLogprob, type Token } from "../../parts/tokens";

export type Settings = { system: string; temperature: number; max_tokens: number; seed: number | null };

export type Turn = {
  asked: string;
  said: string;
  tokens: Token[];
  /** The id of the answer, by which it is recorded. */
  id: string;
  version: string;
  reason: string;
  seconds: number;
};

type Shown = { token: string; logprob: number; top_logprobs: { token: string; logprob: number }[] };
type Chunk = {
  id?: string;
  system_fingerprint?: string;
  error?: { message?: string };
  choices?: { delta?: { content?: string | null }; finish_reason?: string | null; logprobs?: { content?: Shown[] } | null }[];
};

const TOP = 4;

export class Conversation {
  model = $state("");
  turns = $state<Turn[]>([]);
  problem = $state("");
  streaming = $state(false);
  #stop: AbortController | null = null;

  constructor(model: string) {
    this.model = model;
  }

  /** The conversation so far, as a request or a row of a data set has it. */
  messages(system: string): Message[] {
    const said = this.turns.flatMap((turn): Message[] => [{ role: "user", content: turn.asked }, ...(turn.said ? [{ role: "assistant", content: turn.said }] : [])]);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  async ask(asked: string, { system, temperature, max_tokens, seed }: Settings): Promise<void> {
    const began = performance.now();
    this.turns.push({ asked, said: "", tokens: [], id: "", version: "", reason: "", seconds: 0 });
    const turn = this.turns.at(-1)!;
    this.problem = "";
    this.streaming = true;
    this.#stop = new AbortController();
    try {
      const body = { model: this.model, messages: this.messages(system), temperature, max_tokens, stream: true, logprobs: true, top_logprobs: TOP, ...(seed === null ? {} : { seed }) };
      const answer = await send("POST", "/v1/chat/completions", body, this.#stop.signal);
      for await (const chunk of chunks(answer)) {
        if (chunk.error) throw new Error(chunk.error.message ?? "the answer broke off");
        turn.id = chunk.id ?? turn.id;
        turn.version = chunk.system_fingerprint ?? turn.version;
        const choice = chunk.choices?.[0];
        turn.said += choice?.delta?.content ?? "";
        turn.tokens.push(...(choice?.logprobs?.content ?? []).map(shown));
        turn.reason = choice?.finish_reason ?? turn.reason;
        turn.seconds = (performance.now() - began) / 1000;
      }
    } catch (error) {
      if (!this.#stop.signal.aborted) this.problem = (error as Error).message;
    }
    this.streaming = false;
  }

  stop(): void {
    this.#stop?.abort();
  }

  forget(): void {
    this.stop();
    this.turns = [];
    this.problem = "";
  }
}

function shown({ token, logprob, top_logprobs }: Shown): Token {
  const others = top_logprobs.map((each) => `${JSON.stringify(each.token)} ${percent(Math.exp(each.logprob))}`).join("\n");
  return { text: token, tint: tintOfLogprob(logprob), title: `log-probability ${figure(logprob)}, ${percent(Math.exp(logprob))}\n${others}` };
}

/** The events of a stream, until its end. */
async function* chunks(answer: Response): AsyncGenerator<Chunk> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    kept += value;
    const events = kept.split("\n\n");
    kept = events.pop()!;
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data) as Chunk;
    }
  }
}
