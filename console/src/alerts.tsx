import type { JSX } from "preact";
import { Empty, Page } from "./ui";
export function Alerts(): JSX.Element {
  return (
    <Page title="Alerts">
      <Empty title="Nothing yet" />
    </Page>
  );
}
