// Something that is asked of the server: once at a time, however often somebody clicks.
import { onDestroy } from "svelte";

/** To be made while a component is set up. */
export class Action {
  /** Whether it is under way. */
  waiting = $state(false);
  /** Why it did not work the last time. */
  problem = $state("");
  #gone = false;

  constructor() {
    onDestroy(() => (this.#gone = true));
  }

  /** Carry it out, unless it is under way; whether it was, worked, and is still waited for. */
  async run(carryOut: () => Promise<unknown>): Promise<boolean> {
    return (await this.made(async () => [await carryOut()])) !== undefined;
  }

  /** The same with what came of it, undefined for nothing: who has closed the question meanwhile is led nowhere by its answer. */
  async made<Result>(carryOut: () => Promise<Result>): Promise<Result | undefined> {
    if (this.waiting) return undefined;
    this.waiting = true;
    this.problem = "";
    try {
      const result = await carryOut();
      return this.#gone ? undefined : result;
    } catch (error) {
      this.problem = (error as Error).message;
      return undefined;
    } finally {
      this.waiting = false;
    }
  }
}
