// Values of steps, stored as runs of equal values: {first, end, value}.  Steps without a value are in no run.
export class Runs {
  constructor() { this.all = []; }

  add(ordinal, value) {
    if (!value) return;
    const last = this.all[this.all.length - 1];
    if (last && last.value === value && last.end === ordinal) last.end += 1;
    else this.all.push({ first: ordinal, end: ordinal + 1, value });
  }

  forget(before) { this.all = this.all.filter((run) => run.end > before); }
}
