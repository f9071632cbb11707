// Rows of a split, read page by page as they come into sight.
import { get } from "../../lib/api";
import type { AnyRow, Split } from "./sets";

const PAGE = 100;
/** Pages that are kept: who scrolls through a million rows does not keep them all. */
const KEPT = 50;

export class PagedRows {
  problem = $state("");
  #pages = $state.raw<ReadonlyMap<number, readonly AnyRow[]>>(new Map());
  #asked = new Set<number>();
  #failed = new Set<number>();

  constructor(
    readonly name: string,
    readonly version: string,
    readonly split: Split,
  ) {}

  /** The row at a place of the split; undefined while it is being read. */
  at(place: number): AnyRow | undefined {
    return this.#pages.get(Math.floor(place / PAGE))?.[place % PAGE];
  }

  /** Have rows from `first` to before `last`. */
  want(first: number, last: number): void {
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page++) void this.#read(page);
  }

  /** Read once more what could not be. */
  async again(): Promise<void> {
    await Promise.all([...this.#failed].map((page) => this.#read(page)));
  }

  async #read(page: number): Promise<void> {
    if (this.#asked.has(page)) return;
    this.#asked.add(page);
    this.#failed.delete(page);
    try {
      const { data } = await get("/api/v1/datasets/{name}/versions/{version}/rows", { name: this.name, version: this.version }, { split: this.split, limit: PAGE, offset: page * PAGE });
      const pages = new Map(this.#pages).set(page, data);
      for (const oldest of pages.keys()) {
        if (pages.size <= KEPT) break;
        pages.delete(oldest);
        this.#asked.delete(oldest);
      }
      this.#pages = pages;
      this.problem = "";
    } catch (error) {
      this.#asked.delete(page);
      this.#failed.add(page);
      this.problem = (error as Error).message;
    }
  }
}
