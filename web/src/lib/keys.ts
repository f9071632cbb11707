// Keys that do something on a page.

/** What each key does when it is pressed, once however long it is held, while nobody writes in a field or answers a question, unless what has the focus used it. */
export function onKeys(keys: Record<string, () => void>): (event: KeyboardEvent) => void {
  return (event) => {
    if (event.defaultPrevented || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
    if ((event.target as Element).closest?.("input, select, textarea, dialog")) return;
    const action = keys[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  };
}
