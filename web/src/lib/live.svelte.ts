// What changed on the server, as it happens: pages read again what they show.
import { onDestroy } from "svelte";

/** Kinds of things that change. */
export type Topic = "runs" | "rollouts" | "jobs" | "points" | "datasets" | "evaluations" | "graders" | "deployments" | "spans" | "feedback" | "keys" | "processes";

/** Nothing tells these of themselves often enough to wait for it. */
const LOOK_AGAIN_MS = 15_000;

class Live {
  /** Whether changes are being told now. */
  connected = $state(false);
  #source: EventSource | null = null;
  #listeners = new Set<(topics: Set<string> | null) => void>();

  begin(): void {
    if (this.#source) return;
    const source = new EventSource("/api/v1/live");
    source.onopen = () => {
      this.connected = true;
      // What changed while nobody listened is not told afterwards.
      this.#tell(null);
    };
    source.onerror = () => (this.connected = false);
    source.addEventListener("changed", (event) => this.#tell(new Set((JSON.parse(event.data) as { topics: string[] }).topics)));
    this.#source = source;
  }

  end(): void {
    this.#source?.close();
    this.#source = null;
    this.connected = false;
  }

  /** Call `listener` with what changed, null for everything; gives what ends it. */
  listen(listener: (topics: Set<string> | null) => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #tell(topics: Set<string> | null): void {
    for (const listener of this.#listeners) listener(topics);
  }
}

export const live = new Live();

/** What was read, and read again whenever one of its topics changed. */
export class Reading<Value> {
  value = $state.raw<Value>();
  /** Why it could not be read the last time. */
  problem = $state("");
  #read: () => Promise<Value>;
  #running = false;
  #again = false;
  /** Of the readings that were begun, the newest alone counts. */
  #turn = 0;

  constructor(read: () => Promise<Value>, topics: readonly Topic[]) {
    this.#read = read;
    const stop = live.listen((changed) => {
      if (changed === null || topics.some((topic) => changed.has(topic))) void this.refresh();
    });
    const timer = setInterval(() => document.hidden || void this.refresh(), LOOK_AGAIN_MS);
    onDestroy(() => {
      this.#turn++;
      stop();
      clearInterval(timer);
    });
  }

  /** Read again; behind the reading that is under way where there is one, for it may have looked before the change. */
  async refresh(): Promise<void> {
    if (this.#running) this.#again = true;
    else await this.start();
  }

  /** Read now, whatever is under way: what that brings is of something else. */
  async start(): Promise<void> {
    const turn = ++this.#turn;
    this.#running = true;
    this.#again = false;
    try {
      const value = await this.#read();
      if (turn !== this.#turn) return;
      this.value = value;
      this.problem = "";
    } catch (error) {
      if (turn === this.#turn) this.problem = (error as Error).message;
    }
    if (turn !== this.#turn) return;
    this.#running = false;
    if (this.#again) await this.start();
  }
}

/** Read at once, and again whenever one of `topics` changed or something that `read` depends on did. To be called while a component is set up. */
export function reading<Value>(read: () => Promise<Value>, ...topics: Topic[]): Reading<Value> {
  const made = new Reading(read, topics);
  $effect(() => {
    void made.start();
  });
  return made;
}
