// The time, for what says how long ago something was.

class Clock {
  /** Milliseconds since 1970. */
  now = $state(Date.now());

  constructor() {
    setInterval(() => (this.now = Date.now()), 5000);
  }
}

export const clock = new Clock();
