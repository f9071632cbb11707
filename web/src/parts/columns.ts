// How a table shows its rows.
import type { Snippet } from "svelte";

export type Column<Item> = {
  id: string;
  title: string;
  /** What the column is sorted and searched by, and shows unless it has a cell. */
  value: (item: Item) => string | number | null | undefined;
  cell?: Snippet<[Item]>;
  /** Right-aligned, in digits of one width; sorted from the largest first. */
  number?: boolean;
  sortable?: boolean;
  /** Of the whole width, for what would else take more or less. */
  width?: string;
};
