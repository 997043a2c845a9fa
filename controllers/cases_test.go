package controllers

import (
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// Bugs of other systems, replayed here; docs/cases.md lists them all, with the packages that replay the others.

// Suspended past its schedules, it never ran again, and had to be made anew.
func TestCaseK01(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		ends   time.Duration // when it is resumed, from then
		phase  sales.Phase
		reason string
	}{
		"the end is ahead":  {time.Hour, sales.PhaseLive, sales.ReasonUnavailable},
		"the end is behind": {-time.Second, sales.PhaseClosed, sales.ReasonMissed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			m := w.manage()
			build := w.makeSale("k01", 3, time.Hour).Ends(2 * time.Hour)
			build.Spec.Suspend = true
			sale := build.In(w)
			w.waitFor(sale, sales.PhaseScheduled)
			m.kill()
			// Days pass: start, and in one case end, lie behind when it is resumed. They are moved instead of the clock.
			w.exec("UPDATE flashsale_sale SET starts_at = UTC_TIMESTAMP(6) - INTERVAL 3 DAY, ends_at = UTC_TIMESTAMP(6) + INTERVAL ? SECOND WHERE sale_id = UUID_TO_BIN(?)", tt.ends.Seconds(), sale.UID)
			w.patch(sale, func() {
				sale.Spec.StartTime, sale.Spec.EndTime = metav1.NewTime(time.Now().Add(-72*time.Hour)), new(metav1.NewTime(time.Now().Add(tt.ends)))
				sale.Spec.Suspend = false
			})
			resumed := time.Now().Truncate(time.Second)
			w.manage()
			w.waitFor(sale, tt.phase)
			if readyReason(sale) != tt.reason {
				t.Errorf("Ready has reason %s, want %s", readyReason(sale), tt.reason)
			}
			if tt.phase == sales.PhaseLive {
				w.buy(sale, "ann")
				if sale.Status.OpenedAt.Time.Before(resumed) {
					t.Errorf("opened at %v, but it was resumed at %v", sale.Status.OpenedAt, resumed)
				}
			} else if sale.Status.OpenedAt != nil {
				t.Errorf("opened at %v, and it never was", sale.Status.OpenedAt)
			}
		})
	}
}

// The start deadline was compared in another zone, and the sale ran a second time after a restart.
func TestCaseK10(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.startProcess([]string{"TZ=Etc/GMT+1"}, "--leader-elect=false") // UTC-1
	sale := w.makeSale("k10", 3, -5*time.Minute).Ends(time.Hour).In(w)
	w.waitFor(sale, sales.PhaseLive)
	w.beKubelet(sale)
	w.buy(sale, "ann")
	w.eventually(sale, "it sells", func() bool { return sale.Status.Inventory.Sold == 1 && readyReason(sale) == sales.ReasonLive })
	opened, version := sale.Status.OpenedAt.Time, sale.ResourceVersion
	for _, zone := range []string{"Etc/GMT-13", "Europe/Berlin"} { // UTC+13
		if err := first.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		first = w.startProcess([]string{"TZ=" + zone}, "--leader-elect=false")
		buyer := strings.ReplaceAll(zone, "/", "-")
		w.claim(sale, buyer)
		w.eventually(sale, "the successor looks after it", func() bool { return sale.ResourceVersion != version && sale.Status.Inventory.Held > 0 })
		version = sale.ResourceVersion
		if sale.Status.Phase != sales.PhaseLive || sale.Status.Inventory.Loaded != 3 || !sale.Status.OpenedAt.Time.Equal(opened) {
			t.Errorf("in %s the status is %+v", zone, sale.Status)
		}
		w.exec("UPDATE flashsale_reservation SET expires_at = UTC_TIMESTAMP(6) WHERE sale_id = UUID_TO_BIN(?) AND buyer = ?", sale.UID, buyer)
		w.exec("UPDATE flashsale_wave SET lapses_at = UTC_TIMESTAMP(6) WHERE sale_id = UUID_TO_BIN(?)", sale.UID)
		testmysql.Eventually(t, "the hold is swept", func() bool {
			n, err := w.store.Sweep(ctx, saleID(sale), "test", 10)
			return err == nil && n == 1
		})
		w.eventually(sale, "it is shown", func() bool { return sale.Status.Inventory.Held == 0 })
		version = sale.ResourceVersion
	}
	if report := testmysql.Audit(t, w.store, saleID(sale)); report.Units != 3 || report.Sold != 1 {
		t.Errorf("the rows are %+v", report)
	}
}

// With a start in the future, and a clock that was wrong, it began at once: it is the database's clock that counts, and
// the condition says that the controller's is wrong.
func TestCaseK16(t *testing.T) {
	t.Parallel()
	for name, off := range map[string]time.Duration{"ahead of": 5 * time.Minute, "behind": -5 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.manage(func(m *managed) { m.reconciler.Clock = func() time.Time { return time.Now().Add(off) } })
			sale := w.makeSale("k16", 3, 3*time.Minute).Warmup(0).Ends(time.Hour).In(w)
			w.eventually(sale, "it is loaded", func() bool { return sale.Status.Inventory != nil && sale.Status.Inventory.Loaded == 3 })
			if sale.Status.Phase != sales.PhaseScheduled || w.claim(sale, "ann").Outcome != inventory.OutcomeNotOpen {
				t.Errorf("three minutes before the start the phase is %s", sale.Status.Phase)
			}
			w.eventually(sale, "the skew is told", func() bool {
				c := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionDatabaseReachable)
				return c.Status == metav1.ConditionTrue && c.Reason == sales.ReasonClockSkew && strings.Contains(c.Message, "5m0s "+name+" the database's")
			})
			start := time.Now().Add(2 * time.Second).Truncate(time.Second)
			w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(start) })
			w.waitFor(sale, sales.PhaseLive)
			if r := w.claim(sale, "ann"); r.Outcome != inventory.OutcomeHeld || r.Reservation.GrantedAt.Before(start) {
				t.Errorf("at the start: %+v", r)
			}
			testmysql.Eventually(t, "an event tells of the skew", func() bool { return w.events(sale, corev1.EventTypeWarning)[sales.ReasonClockSkew] != "" })
		})
	}
}

// A namespace that held the operator and its resources hung on finalizers for ever: here no sale is taken under care
// beside the operator, and so none holds the namespace up.
func TestCaseK20(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage(func(m *managed) { m.reconciler.Namespace = w.namespace })
	sale := w.makeSale("k20", 3, -time.Second).In(w)
	w.eventually(sale, "it is refused", func() bool { return readyReason(sale) == sales.ReasonOperatorNamespace })
	if !meta.IsStatusConditionTrue(sale.Status.Conditions, sales.ConditionStalled) || len(sale.Finalizers) != 0 || len(w.children()) != 0 {
		t.Errorf("finalizers %v, children %v, conditions %+v", sale.Finalizers, w.children(), sale.Status.Conditions)
	}
	if _, err := w.store.Snapshot(ctx, saleID(sale)); err == nil {
		t.Error("something was loaded")
	}
	if err := k8s.Delete(ctx, sale); err != nil {
		t.Fatal(err)
	}
	if w.get(sale) {
		t.Errorf("it is still there: %v", sale.Finalizers)
	}
}

// The operator was removed first, and its resources were stuck for ever: docs/lifecycle.md says how to free them, and
// "make undeploy" does not come to it.
func TestCaseK23(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.manage()
	sale := w.makeSale("k23", 3, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	testmysql.Eventually(t, "the children are there", func() bool { return len(w.children()) == usual })
	m.kill()
	if err := k8s.Delete(ctx, sale); err != nil {
		t.Fatal(err)
	}
	if !w.get(sale) {
		t.Fatal("the sale did not wait for the operator")
	}
	text, err := os.ReadFile("../docs/lifecycle.md")
	if err != nil {
		t.Fatal(err)
	}
	commands := 0
	for line := range strings.Lines(string(text)) {
		args, found := strings.CutPrefix(strings.TrimSpace(line), "kubectl ")
		if !found {
			continue
		}
		commands++
		args = strings.NewReplacer("NAME", sale.Name, "UID", string(sale.UID), "'", "").Replace(args)
		if out, err := kubectl(append([]string{"-n", w.namespace}, strings.Fields(args)...)...); err != nil {
			t.Errorf("kubectl %s: %v: %s", args, err, out)
		}
	}
	if commands != 2 || w.get(sale) || len(w.children()) != 0 {
		t.Errorf("after the %d commands of the document: children %v", commands, w.children())
	}
	if report := testmysql.Audit(t, w.store, saleID(sale)); report.Available != 3 {
		t.Errorf("the rows are %+v", report.Counts)
	}
}

// Stock was given back while payments were in flight: a deleted sale keeps its tables and pods until the last hold is
// paid or has lapsed.
func TestCaseK25(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("k25", 3, -time.Second).Policy(sales.DeletionDelete).In(w)
	w.waitFor(sale, sales.PhaseLive)
	held := w.claim(sale, "ann")
	if err := k8s.Delete(ctx, sale, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Fatal(err)
	}
	w.waitFor(sale, sales.PhaseDraining)
	testmysql.Eventually(t, "the gate is closed", func() bool { return w.claim(sale, "bob").Outcome == inventory.OutcomeClosed })
	if len(w.children()) != usual {
		t.Errorf("children while a hold is live: %v", w.children())
	}
	if r, err := testmysql.Confirm(w.store, saleID(sale), held.Reservation.ID, "pay"); err != nil || r.State != inventory.Confirmed {
		t.Errorf("the payment in flight got %+v, %v", r, err)
	}
	w.gone(sale)
	if _, err := w.store.Snapshot(ctx, saleID(sale)); err == nil {
		t.Error("the rows are still there")
	}
	testmysql.Eventually(t, "the children are gone", func() bool { return len(w.children()) == 0 })
}
