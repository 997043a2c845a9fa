package inventory_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// The tests here replay docs/cases.md: bugs that other systems had in production. Each pod is a line of its own, with
// its own connections.

// Both shoppers stood on the payment page and pressed Pay: the count went to -1.
func TestCase008(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).In(t, store)
	results := stampede(t, store, sale, 2, buyers(2, 1))
	if n := count(results); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeAllHeld] != 1 {
		t.Fatalf("outcomes %v, want one held; the other is told before any payment page", n)
	}
	for _, r := range results {
		if r.Outcome == inventory.OutcomeHeld {
			if _, err := testmysql.Confirm(store, sale.ID, r.Reservation.ID, "pay"); err != nil {
				t.Fatal(err)
			}
		}
	}
	wantOutcome(t, claimOne(t, store, sale, "late", 1), inventory.OutcomeSoldOut)
}

// Read, add, write back: lost updates oversold.
func TestCase012(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(100).In(t, store)
	if n := count(stampede(t, store, sale, 5, buyers(500, 1))); n[inventory.OutcomeHeld] != 100 || n[inventory.OutcomeAllHeld] != 400 {
		t.Errorf("outcomes %v, want 100 held", n)
	}
}

// Two carts of 100 from a stock of 100 were both paid.
func TestCase015(t *testing.T) {
	store := testmysql.Store(t)
	for range 10 {
		sale := testmysql.Sale(100).MaxPerBuyer(100).In(t, store)
		if n := count(stampede(t, store, sale, 2, buyers(2, 100))); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeAllHeld] != 1 {
			t.Errorf("outcomes %v, want one held and no split of the units", n)
		}
	}
}

// Each cart below the stock, together above it.
func TestCase018(t *testing.T) {
	store := testmysql.Store(t)
	for range 10 {
		sale := testmysql.Sale(10).MaxPerBuyer(10).In(t, store)
		requests := []inventory.Request{{Buyer: "a", Quantity: 6}, {Buyer: "b", Quantity: 6}, {Buyer: "c", Quantity: 5}, {Buyer: "d", Quantity: 5}}
		var held int64
		for _, r := range stampede(t, store, sale, 4, requests) {
			if r.Outcome == inventory.OutcomeHeld {
				held += int64(r.Reservation.Quantity)
			}
		}
		if held == 0 || held > 10 {
			t.Errorf("%d units held", held)
		}
		for i := range 10 - held { // leftovers stay claimable
			wantOutcome(t, claimOne(t, store, sale, fmt.Sprint("late-", i), 1), inventory.OutcomeHeld)
		}
	}
}

// A pending payment did not hold the stock.
func TestCase024(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).TTL(5*time.Minute).In(t, store)
	claimOne(t, store, sale, "a", 1)
	for i := range 100 {
		wantOutcome(t, claimOne(t, store, sale, fmt.Sprint("other-", i), 1), inventory.OutcomeAllHeld)
	}
}

// Failed payments and expired orders kept tickets locked.
func TestCase029(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1).TTL(time.Second).In(t, store)
	first := claimOne(t, store, sale, "a", 1)
	for range 2 { // the provider reports the failure, twice
		if _, err := store.Release(ctx, sale.ID, first.Reservation.ID, "test"); err != nil {
			t.Fatal(err)
		}
	}
	second := claimOne(t, store, sale, "b", 1)
	wantOutcome(t, second, inventory.OutcomeHeld) // back at once
	testmysql.Eventually(t, "without any report, the hold lapses", func() bool {
		r, err := store.Reservation(ctx, sale.ID, second.Reservation.ID)
		return err == nil && r.State == inventory.Expired
	})
	third := claimOne(t, store, sale, "c", 1)
	wantOutcome(t, third, inventory.OutcomeHeld)
	if late := third.Reservation.GrantedAt.Sub(second.Reservation.ExpiresAt); late < 0 || late > 2*time.Second {
		t.Errorf("the unit came back %v after its hold ended", late)
	}
}

// Stock was reduced twice for one payment.
func TestCase040(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(3).In(t, store)
	r := claimOne(t, store, sale, "a", 1).Reservation
	var wg sync.WaitGroup
	answers := make([]*inventory.Reservation, 100)
	for i := range answers {
		wg.Go(func() {
			var err error
			if answers[i], err = testmysql.Confirm(store, sale.ID, r.ID, "pay"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, a := range answers {
		if a == nil || a.ID != r.ID || a.State != inventory.Confirmed || a.PaymentID != "pay" {
			t.Fatalf("answer %+v", a)
		}
	}
	if report := testmysql.Audit(t, store, sale.ID); report.Sold != 1 {
		t.Errorf("%d units sold for one payment", report.Sold)
	}
}

// SKIP LOCKED with an ORDER BY that the index cannot serve: one worker's sort locked every candidate, and the next saw
// an empty shelf.
func TestCase066(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1000).In(t, store)
	paused, err := store.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = paused.Rollback() }()
	scan(t, paused, inventory.FreshUnitsSQL, sale.ID[:], 1, 1001, 10)
	got := claimOne(t, store, sale, "b", 1)
	wantOutcome(t, got, inventory.OutcomeHeld)
	if got.Reservation.Units[0] != 11 {
		t.Errorf("got unit %d, want 11, the first that is not locked", got.Reservation.Units[0])
	}
}

// A limit of one per user counted orders, and quantity 100 passed.
func TestCase069(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(1000).In(t, store)
	wantOutcome(t, claimOne(t, store, sale, "a", 100), inventory.OutcomeLimit)
	if snap, err := store.Snapshot(ctx, sale.ID); err != nil || snap.Available != 1000 {
		t.Errorf("counts %+v, %v", snap, err)
	}
}

// The same user twice: stock -6 while the cache said 0.
func TestCase077(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(50).In(t, store)
	requests := make([]inventory.Request, 50)
	for i := range requests {
		requests[i] = inventory.Request{Buyer: "same", Quantity: 1}
	}
	var wg sync.WaitGroup
	results := make([]inventory.Result, 50)
	for i := range results { // 50 pods, to race as hard as can be
		wg.Go(func() {
			got, err := store.Claim(ctx, sale.ID, inventory.NewLine(fmt.Sprint("pod-", i)), requests[i:i+1])
			if err != nil {
				t.Error(err)
				return
			}
			results[i] = got[0]
		})
	}
	wg.Wait()
	if n := count(results); n[inventory.OutcomeHeld] != 1 || n[inventory.OutcomeReplay] != 49 {
		t.Errorf("outcomes %v, want one held and 49 replays", n)
	}
	for _, r := range results {
		if r.Reservation == nil || r.Reservation.ID != results[0].Reservation.ID {
			t.Errorf("reservation %+v is not the one of the others", r.Reservation)
		}
	}
}

// A leader that lost its lease, and does not know, goes on provisioning.
func TestCaseK27Loading(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(20_000).Obj()
	if err := store.Register(ctx, sale); err != nil {
		t.Fatal(err)
	}
	// The first loader stops in the middle of its work, and goes on when the second one has finished.
	pause, resume := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := store.Load(ctx, sale.ID, func(int64, int64) { once.Do(func() { close(pause); <-resume }) })
		if err != nil {
			t.Error(err)
		}
	})
	<-pause
	newer := sale
	newer.Generation, newer.SKU = 2, "new"
	if err := store.Register(ctx, newer); err != nil {
		t.Fatal(err)
	}
	if n, err := store.Load(ctx, sale.ID, nil); err != nil || n != 20_000 {
		t.Errorf("loaded %d, %v", n, err)
	}
	close(resume)
	wg.Wait()
	if err := store.Register(ctx, sale); err != nil { // the stale writer
		t.Fatal(err)
	}
	snap, err := store.Snapshot(ctx, sale.ID)
	if err != nil {
		t.Fatal(err)
	}
	if snap.Loaded != 20_000 || snap.Available != 20_000 || snap.SKU != "new" {
		t.Errorf("loaded %d, available %d, sku %s: want 20,000 rows and the newer spec", snap.Loaded, snap.Available, snap.SKU)
	}
	testmysql.Audit(t, store, sale.ID)
}

// What is wrong with a database is said in a word for conditions and a sentence for people, and nothing is changed.
func TestSetupErrors(t *testing.T) {
	good := testmysql.DSN(t)
	admin := testmysql.Admin(t)
	dsn := func(change func(user, password, addr, db *string)) string {
		cfg := testmysql.Config(t)
		change(&cfg.User, &cfg.Passwd, &cfg.Addr, &cfg.DBName)
		return cfg.FormatDSN()
	}
	readOnly := "ro_" + fmt.Sprint(time.Now().UnixNano()%1e9)
	for _, q := range []string{"CREATE USER " + readOnly + " IDENTIFIED BY 'right'", "GRANT SELECT ON *.* TO " + readOnly} {
		if _, err := admin.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _, _ = admin.ExecContext(ctx, "DROP USER "+readOnly) })
	myISAM := testmysql.Open(t, good)
	if _, err := myISAM.DB().ExecContext(ctx, "CREATE TABLE flashsale_unit (sale_id BINARY(16), unit_no INT, state INT) ENGINE=MyISAM"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, dsn, want string }{
		{"not a DSN", "mysql://root@host/db", inventory.ReasonInvalidDSN},
		{"no database", dsn(func(_, _, _, db *string) { *db = "" }), inventory.ReasonInvalidDSN},
		{"nobody listens", dsn(func(_, _, addr, _ *string) { *addr = "127.0.0.1:1" }), inventory.ReasonUnreachable},
		{"wrong password", dsn(func(user, password, _, _ *string) { *user, *password = readOnly, "wrong" }), inventory.ReasonAccessDenied},
		{"unknown database", dsn(func(_, _, _, db *string) { *db = "no_such_db" }), inventory.ReasonUnknownDatabase},
		{"no permission to create tables", dsn(func(user, password, _, _ *string) { *user, *password = readOnly, "right" }), inventory.ReasonPermissionDenied},
		{"tables without row locks", good, inventory.ReasonUnsupportedEngine},
	} {
		t.Run(tt.name, func(t *testing.T) {
			short, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			store, err := inventory.Open(inventory.Options{DSN: tt.dsn})
			if err == nil {
				defer func() { _ = store.Close() }()
				_, err = store.Setup(short)
			}
			var setup *inventory.SetupError
			if !errors.As(err, &setup) || setup.Reason != tt.want {
				t.Errorf("error %v, want reason %s", err, tt.want)
			}
		})
	}
}
