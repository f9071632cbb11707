// What changed on the server, as it happens: pages read again what they show.
import { onDestroy } from "svelte";

import { ofWhatWasAsked } from "./api";

/** Kinds of things that change. */
export type Topic = "runs" | "rollouts" | "jobs" | "points" | "datasets" | "evaluations" | "graders" | "deployments" | "spans" | "feedback" | "keys" | "processes";

/** How often it is looked while nobody tells what changes. */
const LOOK_AGAIN_MS = 15_000;
/** A browser tries again by itself, but not where it was refused. */
const CALL_AGAIN_MS = 5_000;
/** Between two readings of the same, or twice as long as the last took: others wait for the same server. */
const REST_MS = 1_000;

class Live {
  /** Whether changes are being told now. */
  connected = $state(false);
  #wanted = false;
  #source: EventSource | null = null;
  #again: ReturnType<typeof setTimeout> | undefined;
  #listeners = new Set<(topics: Set<string> | null) => void>();

  begin(): void {
    if (this.#wanted) return;
    this.#wanted = true;
    document.addEventListener("visibilitychange", this.#seen);
    this.#seen();
  }

  end(): void {
    this.#wanted = false;
    document.removeEventListener("visibilitychange", this.#seen);
    this.#close();
  }

  /** Call `listener` with what changed, null for everything; gives what ends it. */
  listen(listener: (topics: Set<string> | null) => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Of the six connections that a browser has to a server, pages that nobody sees hold none. */
  #seen = (): void => {
    if (document.hidden) this.#close();
    else this.#open();
  };

  #open(): void {
    if (this.#source) return;
    const source = new EventSource("/api/v1/live");
    source.onopen = () => {
      this.connected = true;
      // What changed while nobody listened is not told afterwards.
      this.#tell(null);
    };
    source.onerror = () => {
      this.connected = false;
      if (source.readyState !== EventSource.CLOSED) return;
      this.#close();
      this.#again = setTimeout(this.#seen, CALL_AGAIN_MS);
    };
    source.addEventListener("changed", (event) => this.#tell(new Set((JSON.parse(event.data) as { topics: string[] }).topics)));
    this.#source = source;
  }

  #close(): void {
    clearTimeout(this.#again);
    this.#source?.close();
    this.#source = null;
    this.connected = false;
  }

  #tell(topics: Set<string> | null): void {
    for (const listener of this.#listeners) listener(topics);
  }
}

export const live = new Live();

/** What is read: why it could not be the last time, and whether it may be when it is read again. */
export interface Read {
  readonly problem: string;
  readonly inVain: boolean;
  start(): Promise<void>;
}

/** What was read, and read again whenever one of its topics changed. */
export class Reading<Value> implements Read {
  value = $state.raw<Value>();
  /** Why it could not be read the last time. */
  problem = $state("");
  /** Whether that is not because of what was asked: it can be tried again. */
  inVain = $state(false);
  #read: () => Promise<Value>;
  #running = false;
  /** Whether it is to be read once more behind what is under way: at once where somebody asked for it, or when it has rested. */
  #again = false;
  #changed = false;
  #rested = 0;
  #waiting: ReturnType<typeof setTimeout> | undefined;
  /** Of the readings that were begun, the newest alone counts. */
  #turn = 0;

  constructor(read: () => Promise<Value>, topics: readonly Topic[]) {
    this.#read = read;
    const stop = live.listen((changed) => {
      if (topics.some((topic) => changed === null || changed.has(topic))) this.#soon();
    });
    // What has no topics never changes.
    const timer = topics.length > 0 ? setInterval(() => live.connected || document.hidden || this.#soon(), LOOK_AGAIN_MS) : undefined;
    onDestroy(() => {
      this.#turn++;
      stop();
      clearInterval(timer);
      clearTimeout(this.#waiting);
    });
  }

  /** Read what has changed: at once where it has rested, and several changes in one. */
  #soon(): void {
    this.#changed = true;
    if (this.#running || this.#waiting !== undefined) return;
    const wait_ms = this.#rested - performance.now();
    if (wait_ms > 0) this.#waiting = setTimeout(() => void this.start(), wait_ms);
    else void this.start();
  }

  /** Read again; behind the reading that is under way where there is one, for it may have looked before the change. */
  async refresh(): Promise<void> {
    if (this.#running) this.#again = true;
    else await this.start();
  }

  /** Read now, whatever is under way: what that brings is of something else. */
  async start(): Promise<void> {
    const turn = ++this.#turn;
    const begun = performance.now();
    this.#running = true;
    this.#again = this.#changed = false;
    clearTimeout(this.#waiting);
    this.#waiting = undefined;
    try {
      const value = await this.#read();
      if (turn !== this.#turn) return;
      this.value = value;
      this.problem = "";
      this.inVain = false;
    } catch (error) {
      if (turn !== this.#turn) return;
      this.problem = (error as Error).message;
      this.inVain = !ofWhatWasAsked(error);
    }
    this.#running = false;
    const now = performance.now();
    this.#rested = now + Math.max(REST_MS, 2 * (now - begun));
    if (this.#again) await this.start();
    else if (this.#changed) this.#soon();
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
