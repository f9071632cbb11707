// Something that is asked of the server: once at a time, however often somebody clicks.

export class Action {
  /** Whether it is under way. */
  waiting = $state(false);
  /** Why it did not work the last time. */
  problem = $state("");

  /** Carry it out, unless it is under way; whether it was and worked. */
  async run(carryOut: () => Promise<unknown>): Promise<boolean> {
    if (this.waiting) return false;
    this.waiting = true;
    this.problem = "";
    try {
      await carryOut();
      return true;
    } catch (error) {
      this.problem = (error as Error).message;
      return false;
    } finally {
      this.waiting = false;
    }
  }
}
