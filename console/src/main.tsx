// The console: a page for people in front of one Penstock server.
import { render } from "preact";
import { type Json, ReportPage } from "./reports";
import { Shell } from "./shell";
import { connect } from "./store";
import "./style.css";

const root = document.getElementById("app")!;
const report = document.getElementById("report");
root.textContent = "";
if (report) render(<ReportPage report={{ name: document.title, content: JSON.parse(report.textContent!) as Json }} />, root); // `penstock simulate --html`
else {
  render(<Shell />, root);
  void connect();
}
