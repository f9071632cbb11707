// Rows of a split, read page by page as they come into sight.
import { untrack } from "svelte";
import { SvelteMap } from "svelte/reactivity";

import { get, ofWhatWasAsked } from "../../lib/api";
import type { Read } from "../../lib/live.svelte";
import type { AnyRow, Split } from "./sets";

const PAGE = 100;
/** Pages that are kept: who scrolls through a million rows does not keep them all. */
const KEPT = 50;

export class PagedRows implements Read {
  #pages = $state.raw<ReadonlyMap<number, readonly AnyRow[]>>(new Map());
  #asked = new Set<number>();
  #wanted = new Set<number>();
  /** Of the pages that are wanted, those that could not be read, and why. */
  #failed = new SvelteMap<number, Error>();

  constructor(
    readonly name: string,
    readonly version: string,
    readonly split: Split,
  ) {}

  get problem(): string {
    return [...this.#failed.values()][0]?.message ?? "";
  }

  get inVain(): boolean {
    return [...this.#failed.values()].some((error) => !ofWhatWasAsked(error));
  }

  /** The row at a place of the split; undefined while it is being read. */
  at(place: number): AnyRow | undefined {
    return this.#pages.get(Math.floor(place / PAGE))?.[place % PAGE];
  }

  /** Have rows from `first` to before `last`, and the one that is open, and no others any more. */
  want(first: number, last: number, open: number): void {
    this.#wanted = new Set([Math.floor(open / PAGE)]);
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page++) this.#wanted.add(page);
    // Who wants rows does not want them once more because some could not be read.
    for (const page of untrack(() => [...this.#failed.keys()])) if (!this.#wanted.has(page)) this.#failed.delete(page);
    for (const page of this.#wanted) void this.#read(page);
  }

  /** Read once more what could not be. */
  async start(): Promise<void> {
    await Promise.all([...this.#failed.keys()].map((page) => this.#read(page)));
  }

  async #read(page: number): Promise<void> {
    if (this.#asked.has(page)) return;
    this.#asked.add(page);
    try {
      const { data } = await get("/api/v1/datasets/{name}/versions/{version}/rows", { name: this.name, version: this.version }, { split: this.split, limit: PAGE, offset: page * PAGE });
      const pages = new Map(this.#pages).set(page, data);
      for (const oldest of pages.keys()) {
        if (pages.size <= KEPT) break;
        pages.delete(oldest);
        this.#asked.delete(oldest);
      }
      this.#pages = pages;
      this.#failed.delete(page);
    } catch (error) {
      this.#asked.delete(page);
      if (this.#wanted.has(page)) this.#failed.set(page, error as Error);
    }
  }
}
