"use strict";
// The reader of episodes. Everything shown comes from the policy and the environment and is hostile
// until proven otherwise: it reaches the document through textContent and nothing else.
(() => {
  const PAGE = 200;
  const episodes = JSON.parse(document.getElementById("episode-data").textContent);
  const find = (id) => document.getElementById(id);
  const outcome = find("outcome"), category = find("category"), query = find("query");
  const items = find("items"), more = find("more"), view = find("episode");
  let matching = [], shown = 0, current = null;

  const element = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined && text !== null) node.textContent = String(text);
    return node;
  };
  const words = (name) => String(name).replaceAll("_", " ");
  const signed = (value) => typeof value === "number" ? (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2) : "–";
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  const haystack = (episode) => {
    episode.haystack ??= [episode.instruction, episode.payload, episode.final_observation,
      ...episode.turns.flatMap((turn) => [turn.observation, turn.response, turn.action, ...(turn.flags ?? [])]),
    ].join("\n").toLowerCase();
    return episode.haystack;
  };
  const matches = (episode) =>
    (outcome.value === "all" || (outcome.value === "success" && episode.success)
      || (outcome.value === "failed" && !episode.success) || episode.failure === outcome.value)
    && (category.value === "" || episode.category === category.value)
    && query.value.toLowerCase().split(/\s+/).every((word) => haystack(episode).includes(word));

  function showList() {
    matching = episodes.filter(matches);
    shown = 0;
    items.replaceChildren();
    find("matches").textContent = `${matching.length} of ${plural(episodes.length, "episode")}`;
    appendItems();
    if (!matching.includes(current)) show(matching[0] ?? null);
  }
  function appendItems() {
    for (const episode of matching.slice(shown, shown + PAGE)) {
      const button = element("button", episode.success ? "" : "failed");
      button.type = "button";
      button.dataset.episode = episode.episode;
      button.append(element("span", "goal", episode.instruction ?? "(no instruction)"));
      const result = episode.success ? "success" : episode.failure_name ?? "failed";
      button.append(element("span", "about",
        `${episode.episode} · ${episode.category ?? ""} · ${result} · ${plural(episode.turns.length, "turn")}`));
      button.addEventListener("click", () => show(episode));
      const item = element("li");
      item.append(button);
      items.append(item);
    }
    shown = Math.min(matching.length, shown + PAGE);
    more.hidden = shown >= matching.length;
    mark();
  }
  function mark() {
    for (const button of items.querySelectorAll("button")) {
      const isCurrent = current !== null && button.dataset.episode === String(current.episode);
      button.setAttribute("aria-current", isCurrent);
      if (isCurrent) {
        const above = button.offsetTop - items.offsetTop;
        if (above < items.scrollTop) items.scrollTop = above;
        if (above + button.offsetHeight > items.scrollTop + items.clientHeight) items.scrollTop = above + button.offsetHeight - items.clientHeight;
      }
    }
  }

  function show(episode) {
    current = episode;
    view.replaceChildren(...(episode === null ? [element("p", "muted", "No episode matches.")] : content(episode)));
    view.scrollTop = 0;
    mark();
  }
  function move(by) {
    const place = matching.indexOf(current) + by;
    if (place < 0 || place >= matching.length) return;
    while (place >= shown) appendItems();
    show(matching[place]);
  }
  function content(episode) {
    const bar = element("div", "bar");
    for (const [label, by] of [["Previous", -1], ["Next", 1]]) {
      const button = element("button", "", label);
      button.type = "button";
      button.disabled = matching[matching.indexOf(episode) + by] === undefined;
      button.addEventListener("click", () => move(by));
      bar.append(button);
    }
    const about = element("p", "small");
    about.append(element("span", episode.success ? "badge good" : "badge bad",
      episode.success ? "success" : episode.failure_name ?? "failed"));
    about.append(`episode ${episode.episode} · ${episode.category ?? ""} · return ${signed(episode.return)} · ${plural(episode.turns.length, "turn")} · ${episode.stop_reason ?? ""}${episode.measured && ` · ${episode.measured}`}`);
    const parts = [bar, element("h3", "", episode.instruction), about];
    if (episode.payload && episode.payload !== "{}") parts.push(element("p", "small", `task ${episode.payload}`));
    episode.turns.forEach((turn, number) => parts.push(turnView(turn, number + 1)));
    const end = element("div", "turn");
    end.append(element("b", "", "End"), element("p", "text observation", episode.final_observation ?? ""));
    return [...parts, end];
  }
  function turnView(turn, number) {
    const node = element("div", "turn"), head = element("div", "turn-head");
    const tone = turn.reward > 0 ? "badge good" : turn.reward < 0 ? "badge bad" : "badge";
    head.append(element("b", "", `Turn ${number}`), element("span", tone, signed(turn.reward)));
    for (const flag of turn.flags ?? []) {
      const bad = ["format_error", "invalid_action", "response_truncated"].includes(flag);
      head.append(element("span", bad ? "badge bad" : "badge", words(flag)));
    }
    head.append(element("span", "small", `${turn.num_prompt_tokens ?? "–"} ${view.dataset.read} read, ${turn.num_response_tokens ?? "–"} written`));
    node.append(head, element("p", "text observation", turn.observation ?? ""));
    if (turn.thought) node.append(element("p", "text thought", turn.thought));
    if (turn.action) node.append(element("p", "text action", turn.action));
    else node.append(element("p", "text unread", turn.response ?? ""));
    return node;
  }

  function openFromAddress() {
    const match = /^#episode-(\d+)$/.exec(location.hash);
    const episode = match && episodes.find((each) => String(each.episode) === match[1]);
    if (!episode) return;
    outcome.value = "all"; category.value = ""; query.value = "";
    current = episode;
    showList();
    while (matching.indexOf(episode) >= shown) appendItems();
    show(episode);
    find("episodes").scrollIntoView();
  }

  for (const name of [...new Set(episodes.map((each) => each.category ?? ""))].sort()) {
    if (name) category.append(Object.assign(element("option", "", name), { value: name }));
  }
  for (const control of [outcome, category]) control.addEventListener("change", showList);
  query.addEventListener("input", showList);
  more.addEventListener("click", appendItems);
  items.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    move(event.key === "ArrowDown" ? 1 : -1);
    items.querySelector('[aria-current="true"]')?.focus();
  });
  for (const link of document.querySelectorAll("a[data-outcome]")) {
    link.addEventListener("click", () => { outcome.value = link.dataset.outcome; category.value = ""; query.value = ""; showList(); });
  }
  window.addEventListener("hashchange", openFromAddress);
  showList();
  openFromAddress();
})();
