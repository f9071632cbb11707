// A conversation with one model. What it says comes token by token.
import { send } from "../../lib/api";
import { figure, percent } from "../../lib/format";
import { released } from "../../lib/press";
import type { Message } from "../../parts/messages";
import { tintOfLogprob, type Token } from "../../parts/tokens";

export type Consent = "none" | "eval" | "train";
export type Settings = { system: string; temperature: number; max_tokens: number; seed: number | null; consent: Consent };

export type Turn = {
  asked: string;
  said: string;
  tokens: Token[];
  /** How many were sampled, as traces count them: the one that ends an answer has no text. */
  count: number;
  /** What it may be used for. */
  consent: Consent;
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
  usage?: { completion_tokens: number } | null;
  choices?: { delta?: { content?: string | null }; finish_reason?: string | null; logprobs?: { content?: Shown[] } | null }[];
};

const TOP = 4;

export class Conversation {
  model = $state("");
  turns = $state<Turn[]>([]);
  problem = $state("");
  /** What was asked last and not answered, be it refused or stopped: it is no part of the conversation. */
  unanswered = $state("");
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

  /** Say something, and hear the answer to its end; whether there was one. */
  async ask(asked: string, { system, temperature, max_tokens, seed, consent }: Settings): Promise<boolean> {
    const began = performance.now();
    this.turns.push({ asked, said: "", tokens: [], count: 0, consent, id: "", version: "", reason: "", seconds: 0 });
    const turn = this.turns.at(-1)!;
    this.problem = this.unanswered = "";
    this.streaming = true;
    this.#stop = new AbortController();
    try {
      const body = { model: this.model, messages: this.messages(system), temperature, max_tokens, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: TOP, ...(seed === null ? {} : { seed }) };
      const answer = await send("POST", "/v1/chat/completions", body, this.#stop.signal, { beside: { "x-bloomery-consent": consent } });
      for await (const chunk of chunks(answer)) {
        // What stops it stands below.
        await released();
        if (chunk.error) throw new Error(chunk.error.message ?? "the answer broke off");
        turn.id = chunk.id ?? turn.id;
        turn.version = chunk.system_fingerprint ?? turn.version;
        const choice = chunk.choices?.[0];
        turn.said += choice?.delta?.content ?? "";
        turn.tokens.push(...(choice?.logprobs?.content ?? []).map(shown));
        turn.count = chunk.usage?.completion_tokens ?? turn.tokens.length;
        turn.reason = choice?.finish_reason ?? turn.reason;
        turn.seconds = (performance.now() - began) / 1000;
      }
      if (!turn.reason) throw new Error("the answer broke off before its end");
      return true;
    } catch (error) {
      if (!this.#stop.signal.aborted) this.problem = (error as Error).message;
      this.turns = this.turns.filter((each) => each !== turn);
      this.unanswered = asked;
      return false;
    } finally {
      this.streaming = false;
    }
  }

  stop(): void {
    this.#stop?.abort();
  }

  forget(): void {
    this.stop();
    this.turns = [];
    this.problem = this.unanswered = "";
  }
}

function shown({ token, logprob, top_logprobs }: Shown): Token {
  const others = top_logprobs.map((each) => `${JSON.stringify(each.token)} ${percent(Math.exp(each.logprob))}`).join("\n");
  return { text: token, tint: tintOfLogprob(logprob), title: `log-probability ${figure(logprob)}, ${percent(Math.exp(logprob))}\n${others}` };
}

/** The events of a stream, until its end. Whoever stops reading them ends the sampling too. */
async function* chunks(answer: Response): AsyncGenerator<Chunk> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      kept += value;
      const events = kept.split(/\r?\n\r?\n/);
      kept = events.pop()!;
      for (const event of events) {
        const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data) as Chunk;
      }
    }
  } finally {
    // What has ended, or failed, cannot be cancelled any more, and need not be.
    await reader.cancel().catch(() => undefined);
  }
}
