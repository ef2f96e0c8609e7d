// Keeps the end of a growing text in sight, unless its reader looks elsewhere.

/** Rounded positions may end this far above the end. */
const NEAR = 8;

export class ScrollFollower {
  /** `box` scrolls `content`. `button`, which leads back to the end, is shown when the end is out of sight. */
  constructor(box, content, button) {
    Object.assign(this, { box, content, button, follows: true, last: 0 });
    box.addEventListener("scroll", () => this.#handleScroll());
    button.addEventListener("click", () => this.toEnd());
    const observer = new ResizeObserver(() => this.#settle());
    observer.observe(box);
    observer.observe(content);
  }

  toEnd() {
    this.follows = true;
    this.#settle();
  }

  /** One movement up is enough to stay there, however fast the text grows. */
  #handleScroll() {
    const { scrollTop } = this.box;
    this.follows = this.#isAtEnd() || (this.follows && scrollTop >= this.last);
    this.last = scrollTop;
    this.button.hidden = this.#isAtEnd();
  }

  #settle() {
    if (this.follows) {
      this.box.scrollTop = this.box.scrollHeight;
      this.last = this.box.scrollTop;
    }
    this.button.hidden = this.#isAtEnd();
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }
}
