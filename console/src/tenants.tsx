import type { JSX } from "preact";
import { Empty, Page } from "./ui";
export function Tenants(): JSX.Element {
  return (
    <Page title="Tenants">
      <Empty title="Nothing yet" />
    </Page>
  );
}
