// What somebody has written and nobody has stored: who is about to lose it is asked first.
import { onDestroy } from "svelte";

class Unsaved {
  /** What would lose it, while it is asked whether it is to. */
  asked = $state.raw<(() => void) | null>(null);
  #watched = new Set<() => boolean>();

  /** Whether there is any. */
  get any(): boolean {
    return [...this.#watched].some((lost) => lost());
  }

  /** To be called while a component is set up, with what says whether leaving it now would lose something. */
  watch(lost: () => boolean): void {
    this.#watched.add(lost);
    onDestroy(() => {
      this.#watched.delete(lost);
      this.asked = null;
    });
  }

  /** Do what leaves the page, at once where nothing is lost by it. */
  leave(go: () => void): void {
    if (this.any) this.asked = go;
    else go();
  }

  stay(): void {
    this.asked = null;
  }

  giveUp(): void {
    const go = this.asked;
    this.asked = null;
    go?.();
  }
}

export const unsaved = new Unsaved();
