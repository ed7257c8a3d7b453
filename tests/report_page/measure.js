// What a reader does on the page, timed.
(async () => {
  const pause = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const words = document.getElementById("words");
  const told = { filters: {}, errors: [] };
  addEventListener("error", (event) => told.errors.push(event.message));
  const timed = async (work) => {
    const began = performance.now();
    await work();
    document.body.getBoundingClientRect();
    return performance.now() - began;
  };
  const shown = () => document.querySelectorAll("details.case:not([hidden])").length;
  for (const text of ["attn", "moe_tiny and not mlp", "not (optim or traced)", "nothing-of-it", ""]) {
    const ms = await timed(() => { words.value = text; words.dispatchEvent(new Event("input")); });
    told.filters[text || "(all)"] = [Number(ms.toFixed(1)), shown()];
    await pause();
  }
  const chip = document.querySelector("#chips .failed");
  told.chip = [Number((await timed(() => chip.click())).toFixed(1)), shown()];
  chip.click();
  const select = document.querySelector("#axes select");
  told.facet = [Number((await timed(() => { select.value = "0"; select.dispatchEvent(new Event("change")); })).toFixed(1)), shown()];
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  told.all = shown();
  // From a failing cell to the tensor and the command: the cell, then Copy. The last cell is packed.
  const cells = [...document.querySelectorAll(".m a.failed")];
  const cell = cells[cells.length - 1];
  const row = document.getElementById(decodeURIComponent(cell.hash.slice(1)));
  const began = performance.now();
  cell.click();
  for (let n = 0; n < 200 && !row.querySelector(".copy"); n += 1) await pause();
  told.opened = [Number((performance.now() - began).toFixed(1)), row.open, /First difference|did not/.test(row.textContent), row.querySelector("pre.repeat").textContent.startsWith("harness rerun")];
  row.querySelector(".copy").click();
  for (let n = 0; n < 50 && row.querySelector(".copy").textContent === "Copy"; n += 1) await pause();
  told.copied = row.querySelector(".copy").textContent;
  told.strips = document.querySelectorAll(".strip").length;
  told.sparks = row.querySelectorAll(".spark").length;
  const packed = [...document.querySelectorAll("details.case.passed")].pop();
  packed.open = true;
  for (let n = 0; n < 200 && !packed.querySelector(".copy"); n += 1) await pause();
  told.unpacked = /checks? passed/.test(packed.textContent);
  return told;
})();
