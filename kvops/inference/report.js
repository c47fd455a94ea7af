// Tells the figures under the pointer; the page is whole without it.
for (const chart of document.querySelectorAll(".chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const plot = chart.querySelector(".plot");
  const tip = Object.assign(document.createElement("div"), { className: "tip" });
  const hair = Object.assign(document.createElement("div"), { className: "hair" });

  plot.addEventListener("pointerleave", () => { tip.remove(); hair.remove(); });
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * data.max;
    const distances = data.x.map((x) => Math.abs(x - at));
    const near = distances.indexOf(Math.min(...distances));
    const head = document.createElement("div");
    head.textContent = `${data.x[near].toFixed(1)} s`;
    tip.replaceChildren(head);
    for (const one of data.series) {
      const row = document.createElement("div");
      const dot = document.createElement("s");
      dot.style.background = `var(${one.color})`;
      row.append(dot, `${one.name}  ${one.values[near] === null ? "none" : `${one.values[near].toLocaleString()} ${data.unit}`}`);
      tip.append(row);
    }
    plot.append(hair, tip);
    const left = (data.x[near] / data.max) * box.width;
    hair.style.left = `${left}px`;
    tip.style.top = "8px";
    tip.style.left = `${Math.max(0, Math.min(box.width - tip.offsetWidth, left + 12))}px`;
  });
}
