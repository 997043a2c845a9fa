package controllers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
	"flashsale.dev/operator/reserver/inventory"
)

// databaseTimeout bounds one pass's questions to the database.
const databaseTimeout = 10 * time.Second

// observe fills s.seen and s.now.
func (s *scope) observe(ctx context.Context) {
	audit, summary := s.seen.Audit, s.seen.Summary // made in this pass
	reservers, deployment := s.pods(ctx, reserverName(s.sale))
	sweeper, _ := s.pods(ctx, sweeperName(s.sale))
	s.seen = plan.Observed{
		Generation:  s.sale.Generation,
		Beside:      s.beside(),
		ForceDelete: s.sale.Annotations[sales.AnnotationForceDelete] == "true",
		Previous:    s.sale.Status,
		Audit:       audit,
		Summary:     summary,
		Reservers:   reservers,
		Sweeper:     sweeper,
	}
	if deployment != nil && reservers.Ready < reservers.Desired {
		s.seen.PodFault = s.podFault(ctx, deployment)
	}
	if s.sale.DeletionTimestamp != nil {
		s.seen.DeletedAt = s.sale.DeletionTimestamp.Time
	}
	s.now = s.clock()
	over := s.sale.Status.Phase == sales.PhaseClosed
	publishing := s.sale.Spec.Webhook != nil && s.seen.Sweeper.Desired > 0
	if s.seen.Beside || over && !publishing && (s.seen.DeletedAt.IsZero() || s.sale.Spec.DeletionPolicy != sales.DeletionDelete) {
		s.Databases.Release(client.ObjectKeyFromObject(s.sale))
		return // nothing to ask
	}
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	if err := s.observeDatabase(ctx); err != nil {
		s.seen.Fault, s.seen.Sale = faultOf(err), nil
		if s.database != nil {
			s.database.doubt()
		}
	}
}

func (s *scope) observeDatabase(ctx context.Context) (err error) {
	if s.database, err = s.openDatabase(ctx); err != nil {
		return err
	}
	if err := s.database.setUp(ctx); err != nil {
		return err
	}
	if w := s.database.warning.Load(); w != nil {
		s.seen.Warning = &plan.Fault{Reason: w.Reason, Message: w.Message}
	}
	before := s.clock()
	snap, err := s.database.Snapshot(ctx, saleID(s.sale))
	if errors.Is(err, inventory.ErrNoSale) {
		s.now, err = s.database.Now(ctx)
		return err
	}
	if err != nil {
		return err
	}
	s.seen.Sale, s.now = snap, snap.Now
	if s.seen.Warning == nil {
		s.seen.Warning = s.skew(before, s.clock())
	}
	if snap.Sold == snap.Units {
		if s.seen.SoldOutAt, err = s.database.SoldOutAt(ctx, saleID(s.sale)); err != nil {
			return err
		}
	}
	if !snap.ClosedAt.IsZero() && s.sale.Spec.Webhook != nil {
		s.seen.Undelivered, err = s.database.PendingEvents(ctx, saleID(s.sale))
	}
	return err
}

// skewTolerated is how far the controller's clock may be from the database's before the condition says so. Nothing depends
// on it: it is told because a clock that is wrong here may be wrong elsewhere.
const skewTolerated = 2 * time.Second

// skew compares the database's clock with the controller's, which was between before and after when the former was read.
func (s *scope) skew(before, after time.Time) *plan.Fault {
	// Both without the monotonic clock, which is never set wrong.
	behind, ahead := s.now.Sub(after.Round(0)), before.Round(0).Sub(s.now)
	off := max(behind, ahead)
	told := meta.FindStatusCondition(s.sale.Status.Conditions, sales.ConditionDatabaseReachable)
	switch {
	case told != nil && told.Reason == sales.ReasonClockSkew && off > skewTolerated/2:
		return &plan.Fault{Reason: told.Reason, Message: told.Message} // a second more or less is no news
	case off < skewTolerated:
		return nil
	}
	return &plan.Fault{Reason: sales.ReasonClockSkew, Message: fmt.Sprintf(
		"the controller's clock is %s %s the database's, which counts; set the clocks of the cluster's nodes and of the database right",
		off.Round(time.Second), map[bool]string{true: "behind", false: "ahead of"}[behind > ahead])}
}

// beside says that the sale is in the operator's own namespace, and not yet under its care.
func (s *scope) beside() bool {
	return s.sale.Namespace == s.Namespace && !controllerutil.ContainsFinalizer(s.sale, sales.Finalizer)
}

func (s *scope) clock() time.Time {
	if s.Clock != nil {
		return s.Clock()
	}
	return time.Now()
}

// openDatabase gives the pool that the sale's Secret asks for.
func (s *scope) openDatabase(ctx context.Context) (*database, error) {
	key := client.ObjectKeyFromObject(s.sale)
	if db := s.Databases.Known(key); db != nil && s.sale.Status.ObservedGeneration == s.sale.Generation {
		return db, nil
	}
	name := s.sale.Spec.Database.SecretRef.Name
	secret := &corev1.Secret{}
	err := s.Direct.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: name}, secret)
	if apierrors.IsNotFound(err) {
		return nil, &inventory.SetupError{Reason: sales.ReasonSecretNotFound, Message: fmt.Sprintf("Secret %s does not exist in namespace %s: create it", name, s.sale.Namespace)}
	}
	if err != nil {
		return nil, &inventory.SetupError{Reason: sales.ReasonSecretUnreadable, Message: fmt.Sprintf("Secret %s cannot be read, will keep trying", name), Err: err}
	}
	options, err := inventory.OptionsFromSecret(secret.Data)
	if err != nil {
		return nil, &inventory.SetupError{Reason: sales.ReasonSecretInvalid, Message: fmt.Sprintf("Secret %s: %v", name, err)}
	}
	return s.Databases.Use(key, options)
}

// faultOf gives a database error as the plan sees it.
func faultOf(err error) *plan.Fault {
	setup := inventory.AsSetupError(err)
	person := setup.Reason != inventory.ReasonUnreachable && setup.Reason != inventory.ReasonDatabaseError && setup.Reason != sales.ReasonSecretUnreadable
	return &plan.Fault{Reason: setup.Reason, Message: setup.Error(), Person: person}
}

// saleID is the key of the sale's rows. Kubernetes gives every object a UUID of its own, also when its name is used again.
func saleID(sale *sales.FlashSale) uuid.UUID { return uuid.MustParse(string(sale.UID)) }
