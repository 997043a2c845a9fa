package plan

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/teststatus"
)

var start = time.Date(2026, 12, 1, 4, 30, 0, 0, time.UTC)

// seen builds what was observed of a sale of 5 units from start to start+30m, with two pods and a warm-up of 5m.
type seen struct {
	spec     sales.FlashSaleSpec
	observed Observed
}

func newSale() *seen {
	end := metav1.NewTime(start.Add(30 * time.Minute))
	return &seen{spec: sales.FlashSaleSpec{SKU: "sku", Units: 5, StartTime: metav1.NewTime(start), EndTime: &end,
		Reserver: sales.ReserverSpec{Replicas: 2, Warmup: metav1.Duration{Duration: 5 * time.Minute}}},
		observed: Observed{Generation: 1}}
}

func (s *seen) registered() *seen {
	s.observed.Sale = &inventory.Snapshot{Sale: inventory.Sale{ID: uuid.New(), Units: 5, Generation: 1, StartsAt: start, EndsAt: start.Add(30 * time.Minute)}}
	return s
}

// loaded has all units loaded an hour before the start; held and sold of them are.
func (s *seen) loaded(held, sold int64) *seen {
	s.registered()
	s.observed.Sale.Loaded, s.observed.Sale.LoadedAt = 5, start.Add(-time.Hour)
	s.observed.Sale.Counts = inventory.Counts{Available: 5 - held - sold, Held: held, Sold: sold}
	if held > 0 {
		s.observed.Sale.NextLapse = start.Add(40 * time.Minute)
	}
	s.observed.Previous.Inventory = &sales.InventoryStatus{Loaded: 5}
	return s
}

func (s *seen) running(ready int32) *seen {
	s.observed.Reservers, s.observed.Sweeper = Pods{2, ready}, Pods{1, 1}
	return s
}

func (s *seen) closed() *seen {
	s.observed.Sale.ClosedAt = start.Add(31 * time.Minute)
	return s
}

func (s *seen) phase(p sales.Phase) *seen {
	s.observed.Previous.Phase, s.observed.Previous.Message = p, "as before"
	return s
}

func (s *seen) with(f func(*seen)) *seen { f(s); return s }

func (s *seen) fault(reason string, person bool) *seen {
	s.observed.Fault, s.observed.Sale = &Fault{reason, "mend it", person}, nil
	return s
}

func (s *seen) deleted(ago time.Duration, policy sales.DeletionPolicy) *seen {
	s.spec.DeletionPolicy = policy
	s.observed.DeletedAt = start.Add(time.Minute - ago)
	return s
}

func TestDecide(t *testing.T) {
	const before, warm, live, after = -time.Hour, -4 * time.Minute, time.Minute, 31 * time.Minute
	openEnd := func(s *seen) { s.spec.EndTime = nil; s.observed.Sale.EndsAt = time.Time{} }
	suspend := func(s *seen) { s.spec.Suspend = true }
	units := func(n int32) func(*seen) { return func(s *seen) { s.spec.Units = n } }
	release := func(s *seen) { s.spec.Closing = sales.ClosingRelease }
	lapsed := func(ago time.Duration) func(*seen) {
		return func(s *seen) { s.observed.Sale.NextLapse = start.Add(after - ago) }
	}
	report := func(ok bool) func(*seen) {
		return func(s *seen) {
			s.observed.Audit, s.observed.Summary = &inventory.Report{OK: ok, Checks: []inventory.Check{{ID: "I2", OK: ok}}}, &inventory.Summary{}
		}
	}
	// want is "phase, work, run or rest, finish or stay, reason of Ready and its status".
	for name, tt := range map[string]struct {
		sale *seen
		at   time.Duration // from the start
		want string
	}{
		"a new object goes to the database":              {newSale(), before, "Pending register rest Pending=False"},
		"a changed spec goes to the database":            {newSale().loaded(0, 0).phase(sales.PhaseScheduled).with(func(s *seen) { s.observed.Generation = 2 }), before, "Scheduled register rest Scheduled=True"},
		"a newer writer's row is left alone":             {newSale().loaded(0, 0).with(func(s *seen) { s.observed.Sale.Generation = 7 }), before, "Scheduled rest Scheduled=True"},
		"registered, it loads":                           {newSale().registered(), before, "Loading load rest Loading=False"},
		"half loaded, it goes on":                        {newSale().registered().with(func(s *seen) { s.observed.Sale.Loaded = 3 }), before, "Loading load rest Loading=False"},
		"all units are in, but nobody recorded it":       {newSale().loaded(0, 0).with(func(s *seen) { s.observed.Sale.LoadedAt = time.Time{} }), before, "Loading load rest Loading=False"},
		"still loading in the warm-up, pods start":       {newSale().registered(), warm, "Loading load run Loading=False"},
		"loaded, it waits without pods":                  {newSale().loaded(0, 0), before, "Scheduled rest Scheduled=True"},
		"suspended before the warm-up, it waits as well": {newSale().loaded(0, 0).with(suspend), before, "Scheduled rest Scheduled=True"},
		"at the warm-up, pods start":                     {newSale().loaded(0, 0), -5 * time.Minute, "Warming run Unavailable=False"},
		"a microsecond before the warm-up, none does":    {newSale().loaded(0, 0), -5*time.Minute - time.Microsecond, "Scheduled rest Scheduled=True"},
		"one of two pods is not warm":                    {newSale().loaded(0, 0).running(1), warm, "Warming run Unavailable=False"},
		"both are":                                       {newSale().loaded(0, 0).running(2), warm, "Warming run Warming=True"},
		"suspended while warming, pods stay":             {newSale().loaded(0, 0).running(2).with(suspend), warm, "Suspended run Suspended=True"},
		"at the start it is live":                        {newSale().loaded(0, 0).running(2), 0, "Live run Live=True"},
		"live with one pod it sells":                     {newSale().loaded(1, 1).running(1), live, "Live run Live=True"},
		"live without a pod it does not":                 {newSale().loaded(1, 1).running(0), live, "Live run Unavailable=False"},
		"suspended while live":                           {newSale().loaded(1, 1).running(2).with(suspend), live, "Suspended run Suspended=True"},
		"all held is not over":                           {newSale().loaded(5, 0).running(2), live, "Live run Live=True"},
		"all sold, it closes":                            {newSale().loaded(0, 5).running(2), live, "Live close run Live=True"},
		"all sold while suspended, it closes":            {newSale().loaded(0, 5).running(2).with(suspend), live, "Suspended close run Suspended=True"},
		"without an end it goes on":                      {newSale().loaded(0, 4).running(2).with(openEnd), 1000 * time.Hour, "Live run Live=True"},
		"more units while live are loaded":               {newSale().loaded(0, 5).running(2).with(func(s *seen) { s.spec.Units, s.observed.Sale.Units = 7, 7 }), live, "Live load run Live=True"},
		"a microsecond before the end it is live":        {newSale().loaded(1, 1).running(2), 30*time.Minute - time.Microsecond, "Live run Live=True"},
		"at the end it drains":                           {newSale().loaded(1, 1).running(2), 30 * time.Minute, "Draining run Draining=True"},
		"suspended at the end it drains":                 {newSale().loaded(1, 1).running(2).with(suspend), after, "Draining run Draining=True"},
		"drained, it closes":                             {newSale().loaded(0, 1).running(2), after, "Draining close run Draining=True"},
		"half loaded at the end, it closes":              {newSale().loaded(0, 0).with(func(s *seen) { s.observed.Sale.Loaded = 3 }), after, "Draining close rest Draining=True"},
		"closed, it is audited":                          {newSale().loaded(0, 5).closed().running(2).phase(sales.PhaseLive), live, "Live audit run Live=True"},
		"the audit passed, all sold":                     {newSale().loaded(0, 5).closed().running(2).with(report(true)), live, "Closed rest SoldOut=True"},
		"the audit passed, units left":                   {newSale().loaded(0, 1).closed().running(2).with(report(true)), after, "Closed rest Ended=True"},
		"the audit failed":                               {newSale().loaded(0, 5).closed().running(2).with(report(false)), after, "Failed rest AuditFailed=False stalled"},
		"over, nobody asks the database":                 {newSale().phase(sales.PhaseClosed).fault("DatabaseUnreachable", false), after, "Closed rest Missed=True"},
		"first seen after the end":                       {newSale(), after, "Closed rest Missed=True"},
		"first seen at the end":                          {newSale(), 30 * time.Minute, "Closed rest Missed=True"},
		"registered, and not loaded by the end":          {newSale().registered(), after, "Closed rest Missed=True"},
		"rows gone":                                      {newSale().loaded(0, 0).running(2).with(func(s *seen) { s.observed.Sale = nil }), live, "Failed run TablesLost=False stalled"},
		"rows gone, first noticed after the end":         {newSale().loaded(0, 0).with(func(s *seen) { s.observed.Sale = nil }), after, "Failed rest TablesLost=False stalled"},

		"fewer units before loading":                     {newSale().registered().with(units(3)), before, "Loading shrink rest Loading=False"},
		"fewer units while waiting":                      {newSale().loaded(0, 0).phase(sales.PhaseScheduled).with(units(3)), before, "Scheduled shrink rest UnitsInUse=False"},
		"fewer units while live":                         {newSale().loaded(1, 1).running(2).phase(sales.PhaseLive).with(units(3)), live, "Live shrink run UnitsInUse=False"},
		"fewer than held and sold, nothing is available": {newSale().loaded(3, 2).running(2).phase(sales.PhaseLive).with(units(3)), live, "Live run UnitsInUse=False"},
		"fewer than sold needs a person":                 {newSale().loaded(1, 4).running(2).phase(sales.PhaseLive).with(units(3)), live, "Live run UnitsInUse=False stalled"},
		"fewer than sold, and all are sold":              {newSale().loaded(0, 5).running(2).phase(sales.PhaseLive).with(units(3)), live, "Live close run UnitsInUse=False stalled"},
		"fewer units by an older controller":             {newSale().loaded(1, 1).running(2).phase(sales.PhaseLive).with(units(3)).with(func(s *seen) { s.observed.Sale.Generation = 9 }), live, "Live run Live=True"},
		"fewer units after the end":                      {newSale().loaded(1, 1).running(2).with(units(3)), after, "Draining run Draining=True"},
		"start moved later in the warm-up, pods go":      {newSale().loaded(0, 0).running(2).phase(sales.PhaseWarming).with(func(s *seen) { s.observed.Sale.StartsAt = start.Add(time.Hour) }), warm, "Scheduled rest Scheduled=True"},
		"start moved earlier, pods start":                {newSale().loaded(0, 0).phase(sales.PhaseScheduled).with(func(s *seen) { s.observed.Sale.StartsAt = start.Add(-time.Hour) }), before, "Live run Unavailable=False"},
		"end moved into the past while live":             {newSale().loaded(0, 1).running(2).phase(sales.PhaseLive).with(func(s *seen) { s.observed.Sale.EndsAt = start.Add(live) }), live, "Draining close run Draining=True"},
		"end moved later while draining, it sells again": {newSale().loaded(1, 1).running(2).phase(sales.PhaseDraining).with(func(s *seen) { s.observed.Sale.EndsAt = start.Add(time.Hour) }), after, "Live run Live=True"},
		"at the end, holds are released":                 {newSale().loaded(1, 1).running(2).with(release), after, "Draining endHolds run Draining=True"},
		"released holds are swept by the sweeper":        {newSale().loaded(1, 1).running(2).with(release).with(lapsed(time.Second)), after, "Draining run Draining=True"},
		"lapsed holds that no sweeper takes":             {newSale().loaded(1, 1).running(0).with(lapsed(3 * time.Second)), after, "Draining sweep run Unavailable=False"},
		"deleted, holds are released":                    {newSale().loaded(1, 0).running(2).with(release).deleted(0, sales.DeletionRetain).with(func(s *seen) { s.observed.Sale.Draining = true }), live, "Draining endHolds run Draining=True"},
		"deleted, lapsed holds that no sweeper takes":    {newSale().loaded(1, 0).running(0).deleted(0, sales.DeletionRetain).with(func(s *seen) { s.observed.Sale.Draining = true; s.observed.Sale.NextLapse = start }), live, "Draining sweep run Unavailable=False"},
		"beside the operator":                            {newSale().with(func(s *seen) { s.observed.Beside = true }), before, "Failed rest OperatorNamespace=False stalled"},
		"no image":                                       {newSale().loaded(0, 0).running(0).with(func(s *seen) { s.observed.PodFault = &Fault{"ImageUnavailable", "not found", false} }), warm, "Warming run ImageUnavailable=False"},
		"no image for one of two pods while live":        {newSale().loaded(0, 0).running(1).with(func(s *seen) { s.observed.PodFault = &Fault{"ImageUnavailable", "not found", false} }), live, "Live run Live=True"},

		"database away before loading":                    {newSale().fault("DatabaseUnreachable", false), before, "Pending rest DatabaseUnreachable=False"},
		"database away while live, pods stay":             {newSale().loaded(0, 0).running(2).phase(sales.PhaseLive).fault("DatabaseUnreachable", false), live, "Live run DatabaseUnreachable=False"},
		"database away at the warm-up, pods start":        {newSale().loaded(0, 0).phase(sales.PhaseScheduled).fault("DatabaseUnreachable", false), warm, "Scheduled run DatabaseUnreachable=False"},
		"database away before the warm-up, they do not":   {newSale().loaded(0, 0).phase(sales.PhaseScheduled).fault("DatabaseUnreachable", false), before, "Scheduled rest DatabaseUnreachable=False"},
		"database away and never loaded, they do not":     {newSale().fault("DatabaseUnreachable", false), warm, "Pending rest DatabaseUnreachable=False"},
		"a missing Secret needs a person":                 {newSale().fault("SecretNotFound", true), before, "Pending rest SecretNotFound=False stalled"},
		"a child's name is taken":                         {newSale().loaded(0, 0).with(func(s *seen) { s.observed.ChildFault = &Fault{"NameConflict", "rename", true} }), warm, "Warming run NameConflict=False stalled"},
		"deleted before anything was loaded":              {newSale().deleted(0, sales.DeletionRetain), before, "Draining rest finish Draining=True"},
		"deleted while live, the gate closes first":       {newSale().loaded(1, 0).running(2).deleted(0, sales.DeletionRetain), live, "Draining drain run Draining=True"},
		"deleted, then edited":                            {newSale().loaded(1, 0).running(2).deleted(0, sales.DeletionRetain).with(func(s *seen) { s.observed.Sale.Draining = true; s.observed.Generation = 3 }), live, "Draining drain run Draining=True"},
		"deleted with fewer units than are held":          {newSale().loaded(3, 2).running(2).deleted(0, sales.DeletionRetain).with(units(3)).with(func(s *seen) { s.observed.Sale.Draining = true }), live, "Draining run Draining=True"},
		"deleted with live holds":                         {newSale().loaded(1, 0).running(2).deleted(0, sales.DeletionRetain).with(func(s *seen) { s.observed.Sale.Draining = true }), live, "Draining run Draining=True"},
		"deleted and drained, rows stay":                  {newSale().loaded(0, 1).running(2).deleted(0, sales.DeletionRetain).with(func(s *seen) { s.observed.Sale.Draining = true }), live, "Draining rest finish Draining=True"},
		"deleted and drained, rows go":                    {newSale().loaded(0, 1).running(2).deleted(0, sales.DeletionDelete).with(func(s *seen) { s.observed.Sale.Draining = true }), live, "Draining purge rest Draining=True"},
		"rows gone, the object goes":                      {newSale().deleted(0, sales.DeletionDelete), live, "Draining rest finish Draining=True"},
		"deleted with live holds, by force":               {newSale().loaded(1, 0).running(2).deleted(0, sales.DeletionRetain).with(func(s *seen) { s.observed.ForceDelete = true }), live, "Draining rest finish Draining=True"},
		"deleted, database away for a moment":             {newSale().loaded(1, 0).running(2).fault("DatabaseUnreachable", false).deleted(10*time.Second, sales.DeletionRetain), live, "Draining run DatabaseUnreachable=False"},
		"deleted, database away for long":                 {newSale().loaded(1, 0).running(2).fault("DatabaseUnreachable", false).deleted(30*time.Second, sales.DeletionRetain), live, "Draining rest finish DatabaseUnreachable=False"},
		"deleted, Secret gone":                            {newSale().loaded(1, 0).running(2).fault("SecretNotFound", true).deleted(0, sales.DeletionRetain), live, "Draining rest finish SecretNotFound=False stalled"},
		"deleted with its rows, database away":            {newSale().loaded(1, 0).fault("DatabaseUnreachable", false).deleted(time.Hour, sales.DeletionDelete), live, "Draining rest DatabaseUnreachable=False"},
		"deleted with its rows, database away, by force":  {newSale().loaded(1, 0).fault("DatabaseUnreachable", false).deleted(time.Hour, sales.DeletionDelete).with(func(s *seen) { s.observed.ForceDelete = true }), live, "Draining rest finish DatabaseUnreachable=False"},
		"deleted when over":                               {newSale().phase(sales.PhaseClosed).deleted(0, sales.DeletionRetain), after, "Closed rest finish Missed=True"},
		"deleted with its rows when over":                 {newSale().loaded(0, 5).closed().phase(sales.PhaseClosed).deleted(0, sales.DeletionDelete), after, "Closed purge rest SoldOut=True"},
		"deleted with its rows when over, database away":  {newSale().loaded(0, 5).phase(sales.PhaseClosed).fault("DatabaseUnreachable", false).deleted(0, sales.DeletionDelete), after, "Closed rest Missed=True"},
		"deleted when over, rows gone":                    {newSale().phase(sales.PhaseClosed).deleted(0, sales.DeletionDelete), after, "Closed rest finish Missed=True"},
		"deleted with its rows by force, Secret is there": {newSale().loaded(0, 5).closed().phase(sales.PhaseClosed).deleted(0, sales.DeletionDelete).with(func(s *seen) { s.observed.ForceDelete = true }), after, "Closed rest finish SoldOut=True"},
	} {
		t.Run(name, func(t *testing.T) {
			now := start.Add(tt.at)
			if tt.sale.observed.Sale != nil {
				tt.sale.observed.Sale.Now = now
			}
			d := Decide(tt.sale.spec, tt.sale.observed, now)
			if got := describe(d); got != tt.want {
				t.Errorf("decided %q, want %q; message %q", got, tt.want, d.Message)
			}
			checkStatus(t, d)
		})
	}
}

func describe(d Decision) string {
	words := []string{string(d.Phase)}
	if d.Work != WorkNone {
		words = append(words, string(d.Work))
	}
	words = append(words, map[bool]string{true: "run", false: "rest"}[d.Run])
	if d.Finish {
		words = append(words, "finish")
	}
	if ready := meta.FindStatusCondition(d.Conditions, sales.ConditionReady); ready != nil {
		words = append(words, fmt.Sprintf("%s=%s", ready.Reason, ready.Status))
	}
	if meta.FindStatusCondition(d.Conditions, sales.ConditionStalled) != nil {
		words = append(words, "stalled")
	}
	return strings.Join(words, " ")
}

// The sweeper of a closed sale is wanted while the webhook has still to be told something.
func TestPublish(t *testing.T) {
	hooked := func(undelivered int) func(*seen) {
		return func(s *seen) { s.spec.Webhook, s.observed.Undelivered = &sales.WebhookSpec{}, undelivered }
	}
	for name, tt := range map[string]struct {
		sale *seen
		want bool
	}{
		"events wait when it closes": {newSale().loaded(0, 5).closed().running(2).with(hooked(1)).with(func(s *seen) {
			s.observed.Audit, s.observed.Summary = &inventory.Report{OK: true}, &inventory.Summary{}
		}), true},
		"events wait":                   {newSale().loaded(0, 5).closed().running(2).phase(sales.PhaseClosed).with(hooked(1)), true},
		"all are delivered":             {newSale().loaded(0, 5).closed().running(2).phase(sales.PhaseClosed).with(hooked(0)), false},
		"the database does not say":     {newSale().running(2).phase(sales.PhaseClosed).with(hooked(0)).fault("DatabaseUnreachable", false), true},
		"nobody is to be told":          {newSale().loaded(0, 5).closed().running(2).phase(sales.PhaseClosed), false},
		"the object is deleted":         {newSale().loaded(0, 5).closed().running(2).phase(sales.PhaseClosed).with(hooked(1)).deleted(0, sales.DeletionRetain), false},
		"a sale that never had sweeper": {newSale().phase(sales.PhaseClosed).with(hooked(1)), false},
	} {
		t.Run(name, func(t *testing.T) {
			d := Decide(tt.sale.spec, tt.sale.observed, start.Add(time.Hour))
			if d.Publish != tt.want || d.Publish && d.Wake == 0 || d.Phase != sales.PhaseClosed || d.Run {
				t.Errorf("%+v, want Publish %t", d, tt.want)
			}
		})
	}
}

// A database that works but may lose commits in a crash is used, and the condition says so.
func TestAWarningIsInTheCondition(t *testing.T) {
	s := newSale().loaded(1, 1).running(2).with(func(s *seen) { s.observed.Warning = &Fault{Reason: inventory.ReasonNotDurable, Message: "set it"} })
	d := Decide(s.spec, s.observed, start.Add(time.Minute))
	c := meta.FindStatusCondition(d.Conditions, sales.ConditionDatabaseReachable)
	if d.Phase != sales.PhaseLive || c.Status != metav1.ConditionTrue || c.Reason != inventory.ReasonNotDurable {
		t.Errorf("phase %s, condition %+v", d.Phase, c)
	}
}

// checkStatus makes a status of the decision, as the controller does, and asserts the rules.
func checkStatus(t *testing.T, d Decision) {
	t.Helper()
	sale := &sales.FlashSale{ObjectMeta: metav1.ObjectMeta{Generation: 1}, Status: sales.FlashSaleStatus{ObservedGeneration: 1, Phase: d.Phase, Message: d.Message, Conditions: d.Conditions}}
	for i := range sale.Status.Conditions {
		sale.Status.Conditions[i].ObservedGeneration, sale.Status.Conditions[i].LastTransitionTime = 1, metav1.NewTime(start)
	}
	if d.Phase == sales.PhaseClosed { // these come from what was seen, not from the decision
		sale.Status.Audit, sale.Status.Result, sale.Status.ClosedAt = &sales.AuditStatus{Passed: true}, &sales.ResultStatus{}, new(metav1.NewTime(start))
	}
	for _, broken := range teststatus.Violations(sale) {
		t.Error(broken)
	}
}

func TestWake(t *testing.T) {
	for name, tt := range map[string]struct {
		sale *seen
		at   time.Duration
		want time.Duration
	}{
		"long before the warm-up":  {newSale().loaded(0, 0), -24 * time.Hour, wakeAtMost},
		"shortly before it":        {newSale().loaded(0, 0), -5*time.Minute - 3*time.Second, 3 * time.Second},
		"shortly before the start": {newSale().loaded(0, 0).running(2), -300 * time.Millisecond, 300 * time.Millisecond},
		"live":                     {newSale().loaded(0, 0).running(2), time.Minute, wakeLive},
		"draining":                 {newSale().loaded(1, 0).running(2), 30 * time.Minute, wakeLive},
		"with a fault":             {newSale().fault("SecretNotFound", true), 0, wakeFault},
		"over":                     {newSale().phase(sales.PhaseClosed), time.Hour, 0},
		"deleted when over with its rows, no server": {newSale().phase(sales.PhaseClosed).fault("x", false).deleted(0, sales.DeletionDelete), 0, wakeFault},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Decide(tt.sale.spec, tt.sale.observed, start.Add(tt.at)).Wake; got != tt.want {
				t.Errorf("wakes after %v, want %v", got, tt.want)
			}
		})
	}
}

// With an autoscaler, the pods are of full size from the warm-up to a minute after the start.
func TestReplicas(t *testing.T) {
	scaled := func(desired int32) *seen {
		return newSale().loaded(0, 0).with(func(s *seen) {
			s.spec.Reserver.Autoscaling = &sales.AutoscalingSpec{MinReplicas: 1, MaxReplicas: 10}
			s.spec.Reserver.Replicas = 4
			s.observed.Reservers.Desired = desired
		})
	}
	for name, tt := range map[string]struct {
		sale        *seen
		at          time.Duration
		least, want int32
	}{
		"fixed":                                 {newSale().loaded(0, 0).running(1), time.Minute, 2, 2},
		"at the warm-up":                        {scaled(1), -5 * time.Minute, 4, 4},
		"the autoscaler wants more":             {scaled(7), -time.Minute, 4, 7},
		"the first minute":                      {scaled(1), 59 * time.Second, 4, 4},
		"then it may shrink":                    {scaled(2), time.Minute, 1, 2},
		"and grow":                              {scaled(9), time.Hour / 3, 1, 9},
		"never to nothing while a hold is live": {scaled(1).with(func(s *seen) { s.observed.Sale.Held = 1 }), time.Hour, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			d := Decide(tt.sale.spec, tt.sale.observed, start.Add(tt.at))
			if d.Least != tt.least || d.Want != tt.want || !d.Run {
				t.Errorf("least %d, want %d, run %t; expected least %d, want %d", d.Least, d.Want, d.Run, tt.least, tt.want)
			}
		})
	}
}

// The window is half open: it holds its start, and not its end.
func TestCaseK17(t *testing.T) {
	for at, phase := range map[time.Duration]sales.Phase{
		-time.Microsecond: sales.PhaseWarming, 0: sales.PhaseLive, 30*time.Minute - time.Microsecond: sales.PhaseLive, 30 * time.Minute: sales.PhaseDraining,
	} {
		s := newSale().loaded(1, 0).running(2)
		if d := Decide(s.spec, s.observed, start.Add(at)); d.Phase != phase {
			t.Errorf("%v from the start: %s, want %s", at, d.Phase, phase)
		}
	}
}

// A sale right after the change to summer time, in whatever zone its start is written.
func TestCaseK18(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	change := time.Date(2026, 3, 29, 1, 0, 0, 0, time.UTC) // 02:00 becomes 03:00
	opens := time.Date(2026, 3, 29, 3, 30, 0, 0, berlin)
	if opens.Sub(change) != 30*time.Minute {
		t.Fatalf("opens %v after the change", opens.Sub(change))
	}
	for _, zone := range []*time.Location{time.UTC, berlin, time.FixedZone("", -3600), time.FixedZone("", 13*3600)} {
		for edge, phase := range map[time.Duration]sales.Phase{-time.Microsecond: sales.PhaseWarming, 0: sales.PhaseLive} {
			s := newSale().loaded(0, 0).running(2)
			s.spec.StartTime = metav1.NewTime(opens.In(zone))
			s.observed.Sale.StartsAt, s.observed.Sale.EndsAt = opens.In(zone), time.Time{}
			if d := Decide(s.spec, s.observed, opens.UTC().Add(edge)); d.Phase != phase {
				t.Errorf("in %v, %v from the start: %s, want %s", zone, edge, d.Phase, phase)
			}
		}
	}
}
