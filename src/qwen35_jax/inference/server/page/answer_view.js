// One answer on the page while it comes: its thoughts, its text, and how fast it is.

import { FormattedText } from "/page/formatted_text.js";

const SECOND = 1000;
const LATEST_THOUGHT = 120; // characters of the thoughts that show while they are folded

export class AnswerView {
  /**
   * @param {HTMLElement} turn a copy of the template `answer-turn`
   * @param {number} charactersPerToken a guess, until the server tells how many tokens there were
   * @param {() => void} onChange called after what is shown has changed
   */
  constructor(turn, charactersPerToken, onChange) {
    this.charactersPerToken = charactersPerToken;
    this.content = "";
    this.reasoning = "";
    this.turn = turn;
    this.onChange = onChange;
    this.part = (name) => turn.querySelector(`.${name}`);
    this.formatted = new FormattedText(this.part("content"));
    this.asked = performance.now();
    this.first = this.last = this.thoughtEnd = null;
    this.firstCharacters = 0;
    this.usage = null;
    this.drawing = 0;
    turn.classList.add("running");
    this.clock = setInterval(() => this.draw(), SECOND / 4);
    this.draw();
  }

  /** Takes a piece of the answer, as the API has it. */
  take(piece) {
    this.usage = piece.usage ?? this.usage;
    const choice = piece.choices[0];
    if (!choice) return;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const { content, reasoning_content: reasoning } = choice.delta;
    if (!content && !reasoning) return;
    this.last = performance.now();
    if (content && this.reasoning) this.thoughtEnd ??= this.last;
    this.reasoning += reasoning ?? "";
    this.content += content ?? "";
    if (this.first === null) {
      this.first = this.last;
      this.firstCharacters = this.characters;
    }
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  /**
   * Shows that nothing more will come.
   * @param {string} note what the person should know of how it ended; may be empty
   */
  end(note) {
    this.note = note;
    clearInterval(this.clock);
    this.turn.classList.remove("running");
    this.ended = performance.now();
    this.thoughtEnd ??= this.last;
    if (this.usage?.completion_tokens && this.characters) {
      this.charactersPerToken = this.characters / this.usage.completion_tokens;
    }
    this.draw();
  }

  /** @param {string} message */
  fail(message) {
    const error = this.part("error");
    error.textContent = message;
    error.hidden = false;
    this.end("");
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    this.formatted.show(this.content);
    this.drawThoughts();
    this.part("numbers").textContent = this.ended ? this.summary() : this.progress();
    this.onChange();
  }

  drawThoughts() {
    if (!this.reasoning) return;
    const thinking = !this.content && !this.ended;
    const seconds = inSeconds((this.thoughtEnd ?? performance.now()) - this.first);
    const tokens = this.usage?.completion_tokens_details?.reasoning_tokens;
    this.part("thoughts").hidden = false;
    this.part("thoughts").classList.toggle("thinking", thinking);
    this.part("thoughts-title").textContent = thinking
      ? `Thinking for ${seconds}`
      : `Thought for ${seconds}${tokens ? `, ${count(tokens, "token")}` : ""}`;
    const latest = this.reasoning.trimEnd().split("\n").at(-1);
    this.part("thoughts-latest").textContent = thinking ? latest.slice(-LATEST_THOUGHT) : "";
    this.part("thoughts-text").textContent = this.reasoning.trim();
  }

  progress() {
    if (this.first === null) return `Waiting for ${inSeconds(performance.now() - this.asked)}`;
    return `about ${this.speed(this.characters / this.charactersPerToken)}`;
  }

  summary() {
    const parts = [this.note];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this.usage;
      parts.push(count(tokens, "token"));
      if (this.first !== null) parts.push(this.speed(tokens));
      if (details?.cached_tokens) parts.push(`${details.cached_tokens} of ${prompt} prompt tokens cached`);
    } else if (this.first !== null) {
      parts.push(this.progress());
    }
    if (this.first !== null) parts.push(`first after ${inSeconds(this.first - this.asked)}`);
    return parts.filter(Boolean).join(" · ");
  }

  /** How fast tokens come once the prompt has been read; of an answer that came in one piece, that with the prompt. */
  speed(tokens) {
    const later = tokens * (1 - this.firstCharacters / this.characters);
    const rate = this.last > this.first && later ? later / (this.last - this.first) : tokens / (this.last - this.asked);
    return `${(rate * SECOND).toFixed(rate * SECOND < 10 ? 1 : 0)} tokens/s`;
  }

  get characters() {
    return this.reasoning.length + this.content.length;
  }
}

function inSeconds(duration) {
  const seconds = duration / SECOND;
  return `${seconds.toFixed(seconds < 1 ? 2 : seconds < 10 ? 1 : 0)} s`;
}

function count(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}
